"""What selection costs, in ns.

    python -m tests.native.selection_cost PACK

First `select` on random problems, the same in every run, for the arch's nominal device with the table that is shipped
for it. Each problem is timed alone, a few times; the mean of the least times is printed, less what it costs to read the
clock. A problem comes again only after all others, so that no branch predictor has learned it.

Then per shape: `select` for sizes that change with every call, with any workspace and with none; and `plan` for one
problem whose addresses change, which it remembers. The last needs a GPU of the pack's arch. Each is the least of many
rounds, whose calls are timed together: less than a first call costs.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from aotmm.build import link, render
from aotmm.pack import table
from aotmm.runtime.pack import open_pack
from aotmm.runtime.tuning import CDevice, measured_device, nominal_device
from aotmm.target import target

PROGRAM = r"""
#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <time.h>
#include "launcher.h"

enum { CALLS = 100, ROUNDS = 600, DRAWN = 4096, TIMES = 15 };
static const aotmm_launcher *mm;
static const aotmm_device device = DEVICE;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return 1e9 * t.tv_sec + t.tv_nsec;
}

static aotmm_problem product(int64_t m, int64_t n, int64_t k, int nt, int64_t offset) {
  return (aotmm_problem){.a_ptr = 4096 + offset, .b_ptr = 8192, .c_ptr = 16384, .M = m, .N = n, .K = k,
                         .stride_am = k, .stride_ak = 1, .stride_bk = nt ? 1 : n, .stride_bn = nt ? k : 1,
                         .stride_cm = n, .stride_cn = 1, .batch = 1};
}

/* Draw from 0 to 1, always the same numbers. */
static double uniform(void) {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (double)(state >> 11) / 9007199254740992.0;
}

/* Draw a multiple of `step`, log-uniform up to `most`. */
static int64_t size(int64_t step, int64_t most) {
  return step * (int64_t)exp2(log2((double)(most / step) + 1) * uniform());
}

static aotmm_problem layer(void) { return product(size(1, 8192), size(64, 16384), size(64, 16384), 1, 0); }

static aotmm_problem multiples_of_8(void) { return product(size(8, 8192), size(8, 8192), size(8, 8192), 0, 0); }

static aotmm_problem off_a_line(void) {
  aotmm_problem p = layer();
  p.a_ptr += 48;
  return p;
}
static aotmm_problem odd(void) { return product(size(8, 8192), size(8, 8192) + 1, size(8, 8192), 0, 0); }

static double alone(aotmm_problem draw(void)) {
  static aotmm_problem problems[DRAWN];
  static double least[DRAWN];
  double clock = 1e9, total = 0;
  aotmm_plan plan;
  for (int i = 0; i < DRAWN; i++) problems[i] = draw(), least[i] = 1e9;
  for (int time = 0; time < TIMES; time++)
    for (int i = 0; i < DRAWN; i++) {
      const double begin = now();
      mm->select(problems + i, &device, UINT64_MAX, &plan);
      const double each = now() - begin;
      if (each < least[i]) least[i] = each;
    }
  for (int i = 0; i < DRAWN; i++) {
    const double begin = now(), each = now() - begin;
    if (each < clock) clock = each;
    total += least[i];
  }
  return total / DRAWN - clock;
}

static double cold(aotmm_problem p, uint64_t limit) {
  double least = 1e9;
  aotmm_plan plan;
  for (int round = 0; round < ROUNDS; round++) {
    double begin = now();
    for (int i = 0; i < CALLS; i++) {
      p.M += i & 1 ? 1 : -1;
      mm->select(&p, &device, limit, &plan);
    }
    double each = (now() - begin) / CALLS;
    if (each < least) least = each;
  }
  return least;
}

static double remembered(aotmm_problem p) {
  double least = 1e9;
  aotmm_plan plan;
  if (mm->plan(&p, 0, UINT64_MAX, &plan)) return -1;
  for (int round = 0; round < ROUNDS; round++) {
    double begin = now();
    for (int i = 0; i < CALLS; i++) {
      p.a_ptr += 4096;
      mm->plan(&p, 0, UINT64_MAX, &plan);
    }
    double each = (now() - begin) / CALLS;
    if (each < least) least = each;
  }
  return least;
}

int main(int count, char **names) {
  void *library = count == 3 ? dlopen(names[1], RTLD_NOW) : NULL;
  const aotmm_launcher *(*entry)(void) = NULL;
  if (library) *(void **)&entry = dlsym(library, names[2]);
  if (!entry) return 1;
  mm = entry();
  const struct {
    const char *name;
    aotmm_problem problem;
  } cases[] = {{"4096 x 4096 x 4096", product(4096, 4096, 4096, 0, 0)},
               {"1024 x 1024 x 1024 nt", product(1024, 1024, 1024, 1, 0)},
               {"512 x 512 x 65536", product(512, 512, 65536, 0, 0)},
               {"16 x 4096 x 4096 nt", product(16, 4096, 4096, 1, 0)},
               {"3000 x 3080 x 2056", product(3000, 3080, 2056, 0, 0)},
               {"1024 cubed, A off by 2 bytes", product(1024, 1024, 1024, 0, 2)}};
  printf("%u kernels; ns per call on %s\n", mm->kernel_count, *device.name ? device.name : "a nominal device");
  printf("%-30s %8.1f\n", "random layers nt", alone(layer));
  printf("%-30s %8.1f\n", "random multiples of 8", alone(multiples_of_8));
  printf("%-30s %8.1f\n", "random, N odd", alone(odd));
  printf("%-30s %8.1f\n", "random layers, A off a line", alone(off_a_line));
  printf("%-30s %8s %13s %11s\n", "", "select", "no workspace", "remembered");
  for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
    printf("%-30s %8.1f %13.1f %11.1f\n", cases[i].name, cold(cases[i].problem, UINT64_MAX),
           cold(cases[i].problem, 0), remembered(cases[i].problem));
  return 0;
}
"""


def device_of(arch: str) -> CDevice:
    """The nominal device of an arch, or one that a table is shipped for, as its driver describes it."""
    row, tables = target(arch), {each.device: each for each in table.shipped(arch)}
    if not tables:
        return nominal_device(row)
    return measured_device(tables.get(row.device, next(iter(tables.values()))), row.shared_bytes)


def main(folder: Path) -> None:
    """Prints the table for the pack in `folder`."""
    pack = open_pack(folder)
    device = device_of(pack.arch)
    facts = ", ".join(str(getattr(device, field[0])) for field in CDevice._fields_[:-1])
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / "cost.c").write_text(PROGRAM.replace("DEVICE", f'{{{facts}, "{device.name.decode()}"}}'))
        (Path(place) / "launcher.h").write_text(render.header((pack.arch,)))
        subprocess.run(
            [*link.compiler()[0], "-O2", "-I.", "cost.c", "-ldl", "-lm", "-o", "cost"], cwd=place, check=True
        )
        library = (folder / pack.head.library.path).resolve()
        subprocess.run([Path(place) / "cost", library, f"aotmm_launcher_{pack.arch}"], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
