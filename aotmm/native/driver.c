/* What both drivers share: failures, and the facts of devices. */
#include "kernel.h"

#include <stdarg.h>
#include <stdio.h>

static __thread aotmm_error last_error;

int aotmm_fail(int status, int code, int device, const char *call, const char *format, ...) {
  va_list list;
  last_error.status = status;
  last_error.code = code;
  last_error.device = device;
  snprintf(last_error.call, sizeof last_error.call, "%s", call);
  va_start(list, format);
  vsnprintf(last_error.text, sizeof last_error.text, format, list);
  va_end(list);
  return status;
}

int aotmm_fail_forked(int ordinal) {
  return aotmm_fail(AOTMM_NO_DRIVER, 0, ordinal, "fork",
                    "device %d cannot be used: this process was forked after the GPU's driver had been opened, and GPU "
                    "contexts do not survive fork; start such processes with multiprocessing.get_context(\"spawn\")",
                    ordinal);
}

const aotmm_error *aotmm_last_error(void) { return &last_error; }

/* Set the speeds of a device from its driver's figures, 0 for those that it does not tell. Memory moves data twice in a
   clock. */
void set_speeds(aotmm_device *device, int clock_khz, int memory_clock_khz, int bus_bits) {
  device->clock_mhz = clock_khz / 1000;
  device->memory_gbps = (int32_t)((int64_t)memory_clock_khz * 2 * bus_bits / 8 / 1000000);
}

int aotmm_device_facts(int ordinal, aotmm_device *device) {
  const aotmm_device *facts;
  int status = driver_device(ordinal, &facts);
  if (status == AOTMM_OK) *device = *facts;
  return status;
}
