/* The fake CUDA driver of the interpreters with device memory beside it, for programs that bring their data themselves.
 * Device memory is the host's. */
#include "fake_cuda.c"

enum { MAX_BUFFERS = 64 };
static struct buffer {
  uint64_t address, bytes;
} buffers[MAX_BUFFERS];

/* The buffer that is at `address`, or a free place for one at address 0. */
static struct buffer *buffer_at(uint64_t address) {
  for (int i = 0; i < MAX_BUFFERS; i++)
    if (buffers[i].address == address) return buffers + i;
  return NULL;
}

EXPORT CUresult cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  ENTER("cuMemAlloc_v2 bytes=%zu", bytes);
  READY();
  CONTEXT(d);
  (void)d;
  struct buffer *place = buffer_at(0);
  void *memory = NULL;
  if (!bytes || !place || posix_memalign(&memory, 512, bytes)) return OUT_OF_MEMORY;
  memset(memory, 0xff, bytes);
  *place = (struct buffer){(uint64_t)(uintptr_t)memory, bytes};
  *address = place->address;
  return OK;
}
EXPORT CUresult cuMemFree_v2(uint64_t address) {
  ENTER("cuMemFree_v2");
  READY();
  struct buffer *place = address ? buffer_at(address) : NULL;
  if (!place) return INVALID_VALUE;
  free((void *)(uintptr_t)address);
  *place = (struct buffer){0, 0};
  return OK;
}
EXPORT CUresult cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
  ENTER("cuMemcpyHtoD_v2 bytes=%zu", bytes);
  READY();
  memcpy((void *)(uintptr_t)to, from, bytes);
  return OK;
}
EXPORT CUresult cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
  ENTER("cuMemcpyDtoH_v2 bytes=%zu", bytes);
  READY();
  memcpy(to, (const void *)(uintptr_t)from, bytes);
  return OK;
}

/* What is allocated: writes up to MAX_BUFFERS addresses and sizes, returns how many. */
EXPORT int fake_memory(uint64_t *addresses, uint64_t *sizes) {
  int count = 0;
  for (int i = 0; i < MAX_BUFFERS; i++) {
    if (!buffers[i].address) continue;
    addresses[count] = buffers[i].address;
    sizes[count++] = buffers[i].bytes;
  }
  return count;
}
