/* The last plans of each thread, which `plan` finds again. */
#include "core.h"

#include <string.h>

enum { MEMORIES = 64, WORDS = sizeof(aotmm_problem) / sizeof(uint64_t) };
static __thread struct memory {
  uint64_t problem[WORDS]; /* with addresses reduced to the bits that guards and times depend on */
  uint64_t limit;
  int32_t ordinal;
  uint32_t generation; /* 0: empty */
  aotmm_plan plan;
} memories[MEMORIES];

static inline void reduce(uint64_t words[WORDS], const aotmm_problem *p) {
  static const uint8_t addresses[] = {
      AOTMM_PRODUCT_A_PTR,       AOTMM_PRODUCT_B_PTR,       AOTMM_PRODUCT_C_PTR,       AOTMM_PRODUCT_BIAS_PTR,
      AOTMM_PRODUCT_SCALE_A_PTR, AOTMM_PRODUCT_SCALE_B_PTR, AOTMM_PRODUCT_OFFSETS_PTR, AOTMM_PRODUCT_BLOCK_SCALE_A_PTR,
      AOTMM_PRODUCT_BLOCK_SCALE_B_PTR};
  const uint64_t seen = (uint64_t)aotmm_pointer_alignment;
  memcpy(words, p, sizeof *p);
  for (unsigned i = 0; i < sizeof addresses; i++) {
    uint64_t address = words[addresses[i]];
    words[addresses[i]] = (address & (seen - 1)) | (address ? seen : 0);
  }
}

/* Return whether this problem is remembered, up to addresses that make no difference. */
static inline int remembered(const struct memory *memory, const aotmm_problem *p) {
  uint64_t words[WORDS], differ = 0;
  reduce(words, p);
  for (int i = 0; i < WORDS; i++) differ |= words[i] ^ memory->problem[i];
  return !differ;
}

/* Return the slot of a problem, by a hash of the fields that differ between most problems. */
static struct memory *memory_of(const aotmm_problem *p) {
  uint64_t sum = (uint64_t)p->M * 0x9e3779b97f4a7c15 + (uint64_t)p->N * 0xc2b2ae3d27d4eb4f +
                 (uint64_t)p->K * 0x165667b19e3779f9 + (uint64_t)p->stride_am * 0x27d4eb2f165667c5 +
                 (uint64_t)p->stride_bk * 0x85ebca6b2c2b2ae3 + (uint64_t)p->stride_cm * 0xff51afd7ed558ccd +
                 ((uint64_t)(p->bias_ptr != 0) ^ (uint64_t)p->grouped << 1 ^ (uint64_t)p->activation << 20 ^ (uint64_t)p->batch << 8) * 0xc4ceb9fe1a85ec53;
  return memories + (sum ^ sum >> 32) * 0x9e3779b97f4a7c15 / (UINT64_MAX / MEMORIES + 1);
}

int aotmm_plan_for(const aotmm_problem *problem, int ordinal, uint64_t limit, aotmm_plan *plan) {
  _Static_assert(sizeof *problem == sizeof memories->problem, "whole words");
  uint32_t now = tuning_generation();
  struct memory *memory = memory_of(problem);
  if (memory->generation == now && memory->ordinal == ordinal && memory->limit == limit &&
      remembered(memory, problem)) {
    *plan = memory->plan;
    return AOTMM_OK;
  }
  const aotmm_device *device;
  int status = valid(problem);
  if (status) return status;
  if (problem->M == 0 || problem->N == 0) {
    *plan = (aotmm_plan){.split = 1, .group_m = 1};
    return AOTMM_OK;
  }
  if ((status = driver_device(ordinal, &device)) || (status = choose(problem, device, limit, plan))) return status;
  reduce(memory->problem, problem);
  memory->limit = limit, memory->ordinal = ordinal, memory->generation = now, memory->plan = *plan;
  return AOTMM_OK;
}
