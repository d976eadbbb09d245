/* One kernel of any kind: load it, encode its tensor maps, and launch it with the values of its quantities. */
#include "arithmetic.h"
#include "kernel.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t load_lock = PTHREAD_MUTEX_INITIALIZER;

/* Return an unsigned LEB128, and move behind it. */
static uint64_t next_number(const unsigned char **at) {
  enum { MORE = 0x80, BITS = 7 };
  uint64_t number = 0;
  int shift = 0;
  do {
    number |= (uint64_t)(**at & ~MORE) << shift;
    shift += BITS;
  } while (*(*at)++ & MORE);
  return number;
}

int rebuilt(const aotmm_code *code, const char *kernel, int ordinal, unsigned char **made) {
  enum { ALIGNMENT = 64 }; /* of stored code, too */
  *made = NULL;
  if (!code->base) return AOTMM_OK;
  unsigned char *to = aligned_alloc(ALIGNMENT, (code->bytes / ALIGNMENT + 1) * ALIGNMENT);
  if (!to)
    return aotmm_fail(AOTMM_DRIVER, 0, ordinal, "allocate", "no %llu B of memory for the code of kernel %s",
                      (unsigned long long)code->bytes, kernel);
  const unsigned char *from = code->base, *at = code->stored, *const end = to + code->bytes;
  *made = to;
  while (to < end) {
    const uint64_t kept = next_number(&at), dropped = next_number(&at), added = next_number(&at);
    memcpy(to, from, kept);
    memcpy(to + kept, at, added);
    to += kept + added, from += kept + dropped, at += added;
  }
  *to = 0;
  return AOTMM_OK;
}

/* Find the kernel's function on the current device, which is loaded at its first use. */
static int function_of(uint32_t kernel, int ordinal, aotmm_function *function) {
  aotmm_function *slot = &aotmm_functions[kernel][ordinal];
  *function = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
  if (*function) return AOTMM_OK;
  pthread_mutex_lock(&load_lock);
  int status = AOTMM_OK;
  *function = *slot;
  if (!*function) {
    status = driver_load(aotmm_kernels + kernel, ordinal, function);
    if (status == AOTMM_OK) __atomic_store_n(slot, *function, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&load_lock);
  return status;
}

/* The maps that this thread encoded last: encoding one takes as long as the rest of a launch. A map depends only on the
   fields before `bytes`. */
enum { MAPS = 64 };
static __thread struct encoded {
  const aotmm_tensor_map *map; /* NULL: empty */
  boxed_memory memory;
  _Alignas(AOTMM_TENSOR_MAP_ALIGNMENT) unsigned char bytes[AOTMM_TENSOR_MAP_BYTES];
} maps[MAPS];

/* Return the memory of a parameter's matrices. The driver refuses distances of 0, which dimensions of one have. */
static boxed_memory memory_of(const aotmm_parameter *parameter, const aotmm_tensor_map *map, const quantities *q) {
  const int64_t inner = q->value[map->inner], outer = q->value[map->outer], distance = q->value[map->batch_stride];
  const int64_t line = (inner * map->element_bytes + VECTOR_BYTES - 1) & -(int64_t)VECTOR_BYTES;
  const int64_t stride = outer == 1 ? line : saturated(q->value[map->stride], map->element_bytes);
  return (boxed_memory){
      .address = q->value[parameter->value],
      .sizes = {(uint64_t)inner, (uint64_t)outer, distance ? (uint64_t)q->value[map->batch] : 1},
      .strides = {(uint64_t)stride, (uint64_t)(distance ? saturated(distance, map->element_bytes) : stride)},
  };
}

static int encode(const aotmm_kernel *kernel, const aotmm_parameter *parameter, const quantities *q, int ordinal,
                  void *encoded) {
  const aotmm_tensor_map *map = kernel->maps + parameter->map - 1;
  if (!uses_map(map, q)) {
    memset(encoded, 0, AOTMM_TENSOR_MAP_BYTES);
    return AOTMM_OK;
  }
  const boxed_memory memory = memory_of(parameter, map, q);
  struct encoded *last = maps + ((uint64_t)memory.address + (uintptr_t)map) * 0x9e3779b97f4a7c15 / (UINT64_MAX / MAPS + 1);
  if (last->map != map || memcmp(&last->memory, &memory, sizeof memory)) {
    last->map = NULL;
    int status = driver_encode(kernel, map, &memory, ordinal, last->bytes);
    if (status) return status;
    last->map = map, last->memory = memory;
  }
  memcpy(encoded, last->bytes, sizeof last->bytes);
  return AOTMM_OK;
}

/* Launch a kernel on the current device with the values of its quantities. */
int launch(uint32_t number, const quantities *q, const uint32_t grid[3], int pdl, int ordinal, void *stream) {
  const aotmm_kernel *kernel = aotmm_kernels + number;
  _Alignas(AOTMM_TENSOR_MAP_ALIGNMENT) unsigned char encoded[AOTMM_MAX_MAPS][AOTMM_TENSOR_MAP_BYTES];
  void *parameters[AOTMM_MAX_PARAMETERS]; /* the driver copies the low bytes of narrow ones: all is little-endian */
  aotmm_function function;
  int status;
  for (uint32_t i = 0; i < kernel->parameter_count; i++) {
    const aotmm_parameter *parameter = kernel->parameters + i;
    if (!parameter->map) {
      parameters[i] = (void *)(uintptr_t)(q->value + parameter->value);
      continue;
    }
    parameters[i] = encoded[parameter->map - 1];
    if ((status = encode(kernel, parameter, q, ordinal, parameters[i]))) return status;
  }
  if ((status = function_of(number, ordinal, &function))) return status;
  return driver_launch(function, kernel, grid, kernel->pdl ? pdl : AFTER, stream, parameters, ordinal);
}

int load(uint32_t kernel, int ordinal) {
  aotmm_function function;
  return function_of(kernel, ordinal, &function);
}

int aotmm_preload(int ordinal) {
  const aotmm_device *device;
  void *saved;
  int status = driver_device(ordinal, &device);
  if (status || (status = driver_enter(ordinal, &saved))) return status;
  for (uint32_t i = 0; i < aotmm_kernel_count && status == AOTMM_OK; i++)
    if (aotmm_kernels[i].shared_bytes <= (uint32_t)device->shared_bytes) status = load(i, ordinal);
  driver_leave(saved);
  return status;
}
