/* What products add to the launch of kernels (kernel.h): problems (problem.c), the kernels that fit them (fit.c), tuning
   tables (tuning.c), the time model (time_model.c), the choice of a plan (select.c, remember.c) and its launches
   (launch.c). Tables declared `extern` here are in the generated launcher.c and its tables.h. */
#ifndef AOTMM_CORE_H
#define AOTMM_CORE_H

#include "arithmetic.h"
#include "kernel.h"

enum { LANES = 8 }; /* plans whose times are computed side by side */
typedef float lanes[LANES];

/* What the formula takes from LANES kernels, and what they can do. */
typedef struct aotmm_octet {
  int32_t epilogue[LANES]; /* the richest of siblings; more than any if a reduce has it, -1 for no kernel */
  lanes block_m, block_n, block_k, beside, busy, line, sum_bytes;
  lanes of_cluster, share_a, share_b; /* a block's part of a cluster, and of what all its blocks take in: powers of two */
  lanes base_ns, ns_per_k_step, ns_per_tile, ns_per_byte, ns_per_taken_byte, ns_per_loaded_byte;
} aotmm_octet;

/* A tuning table in use. */
typedef struct aotmm_tuning {
  aotmm_table table;    /* of a device without a name: there is none, and its constants are estimates for the arch's GPU */
  aotmm_octet *octets;  /* of the plainest of aotmm_siblings, in their order */
  uint32_t *places;     /* hash table of shape numbers from 1 on, by a sum of their fields; 0: empty */
  uint32_t place_count; /* a power of two above table.shape_count */
} aotmm_tuning;

/* What drivers do not tell of the multiprocessors of a GPU. */
typedef struct aotmm_hidden_facts {
  const char *name;     /* of the device, without its slice */
  double tensor_tflops; /* of one multiprocessor, dense fp16; 0: no limit but the table's steps */
  double sustained;     /* speed of large products of one multiprocessor, over that of an H100 SXM */
} aotmm_hidden_facts;

/* Products, or partials, of equal types, guards and slices: groups of kernels in aotmm_siblings, tiles of fewest rows first. */
typedef struct aotmm_alike {
  uint16_t first, count; /* `first` is a multiple of LANES */
  uint16_t contiguous; /* strides of A, B and C that must be 1: a bit for each, from AOTMM_PRODUCT_STRIDE_AM on */
} aotmm_alike;

/* A kernel's part of the formula. */
typedef struct aotmm_tile {
  float block_m, block_n, block_k, cluster_k;
  float of_cluster, share_a, share_b; /* as in aotmm_octet */
  float slices;    /* of K, which a cluster multiplies side by side or a block one after another */
  float beside;    /* tiles that share a multiprocessor */
  float busy;      /* of these, so many take no longer than one */
  float line;      /* bytes of A along K, of a step */
  float sum_bytes; /* weighed bytes of an element of partial sums; 0: it writes none */
  float tensor_bytes; /* of an element of A: its time in tensor cores over that of a byte of fp16 */
} aotmm_tile;

extern const aotmm_product aotmm_products[]; /* by kernel, as these: */
extern const aotmm_tile aotmm_tiles[];
extern const int64_t aotmm_pointer_alignment; /* a power of two: guards and times depend only on an address modulo it */
extern const int32_t aotmm_begins_early; /* whether there are kernels whose steps along K may begin before the first element */
extern const int32_t aotmm_threads_multiply; /* whether kernels of family fma are the fast ones for fp32 in full precision */
extern const aotmm_tuning aotmm_built_tunings[]; /* at least 1 */
extern const uint32_t aotmm_built_tuning_count;
extern const aotmm_hidden_facts aotmm_hidden[]; /* the last has no name */
/* The orders of products of some types under `batch_invariant`, by the plainest epilogue that they need, whether tf32 or fast
   sums are allowed, and the kind of scales: their number in aotmm_order_names. 0: any, since all give the same bits, or
   there is no kernel. `sliced`: whether kernels of the order split K, 2 if blocks also add slices one after another. */
enum { AOTMM_NO_SCALES, AOTMM_SCALES, AOTMM_BLOCK_SCALES, AOTMM_SCALE_KINDS };
typedef struct aotmm_orders {
  uint8_t order[AOTMM_EPILOGUE_COUNT][2][AOTMM_SCALE_KINDS], sliced[AOTMM_EPILOGUE_COUNT][2][AOTMM_SCALE_KINDS];
} aotmm_orders;
extern const char *const aotmm_order_names[];
extern const aotmm_orders aotmm_orders_of[AOTMM_DTYPE_COUNT][AOTMM_DTYPE_COUNT][AOTMM_DTYPE_COUNT];
/* Kernel numbers: siblings side by side; reduces and copies in the order of preference. */
extern const uint16_t aotmm_order[];
/* In aotmm_order: kernels that differ only in their epilogue, the plainer first. Groups of none fill octets up. */
extern const aotmm_group aotmm_siblings[];
extern const uint32_t aotmm_octet_count;
extern const aotmm_alike aotmm_alikes[];
/* In aotmm_alikes: products and then partials, or grouped ones, by storage types. */
extern const aotmm_group aotmm_mains[AOTMM_GROUPED_COUNT][AOTMM_DTYPE_COUNT][AOTMM_DTYPE_COUNT][AOTMM_DTYPE_COUNT];
/* In aotmm_order. */
extern const aotmm_group aotmm_reduces[AOTMM_DTYPE_COUNT]; /* by type of C */
extern const aotmm_group aotmm_copies[5];                  /* by bytes of an element */

/* ---- problem.c */

enum { OPERANDS = 3 };
enum { MOST_JOINED = 1 << 30 /* rows of matrices that are copied as one matrix, and elements of rows that are copied as one row */ };
/* Elements of a copy's threads beyond the ends of rows, and their part of the others, up to which tiles need not go over these
   ends: such tiles take a quarter longer. */
enum { MOST_IDLE = 1 << 19, IDLE_PART = 4 };
enum { SECTOR_BYTES = 32, LINE_BYTES = 128 /* lines in the workspace start at multiples of it */ };
enum { PANEL = 128 /* panels begin at multiples of it, so that their addresses are aligned alike, up to 128 bytes */ };
static const int64_t max_workspace = 1ll << 40;
static const int32_t bytes_of_dtype[] = AOTMM_ELEMENT_BYTES;

/* The quantities of one operand of a product. */
typedef struct operand_values {
  uint16_t pointer, rows, cols, row_stride, col_stride, batch_stride, extent, reach;
} operand_values;
extern const operand_values operands[OPERANDS];

/* The matrices of an operand in the workspace, `bytes` together: each has `lines` lines of `length` contiguous elements,
   `pitch` elements apart. Lines are columns if it is transposed, else rows. */
typedef struct copy_layout {
  int transposed;
  int64_t lines, length, pitch, bytes;
} copy_layout;

/* Bytes of any stride, modulo a power of two. */
static inline uint64_t rest_of(int64_t stride, int64_t element_bytes, uint64_t power) {
  return (uint64_t)stride * (uint64_t)element_bytes & (power - 1);
}

/* The address `bytes` behind another; any address may be given, it wraps around. */
static inline int64_t behind(int64_t address, int64_t bytes) { return (int64_t)((uint64_t)address + (uint64_t)bytes); }

static inline int contiguous(const quantities *q, int stride) { return q->value[stride] == 1 || q->free >> stride & 1; }

/* Return the groups of a problem that may have elements; 1 if it is not grouped. */
static inline int64_t groups_of(const aotmm_problem *p) {
  if (!p->grouped) return 1;
  return p->grouped == AOTMM_GROUPED_M && p->M < p->batch ? (p->M ? p->M : 1) : p->batch;
}

int valid(const aotmm_problem *);
int valid_device(const aotmm_device *);
void set_quantities(quantities *, const aotmm_problem *);
void set_extent(quantities *, int operand);
int64_t region(int64_t bytes);
int lies_well(const quantities *, int operand, int64_t element_bytes);
uint32_t needed_along_k(const quantities *, int64_t element_bytes);
uint32_t worth_along_m(const quantities *, int64_t element_bytes);
int64_t rows_of_c(const quantities *, const aotmm_problem *);
void set_layouts(copy_layout *, const quantities *, const aotmm_problem *, uint32_t copies);
int64_t bytes_of_copies(const copy_layout *, uint32_t copies);
void set_copies(quantities *moved, const quantities *, const aotmm_problem *, const copy_layout *, uint32_t copies,
                int64_t address);
void set_copy(quantities *copy, const quantities *, const quantities *moved, int operand, const copy_layout *to);
void set_other_copy(quantities *copy, const quantities *other);
int64_t set_sums(quantities *, uint32_t kernel, int64_t split, int64_t address);
void set_no_sums(quantities *);

/* ---- fit.c */

static inline int64_t tiles_of(uint32_t kernel, int64_t M, int64_t N) {
  return saturated(ceil_div(M, aotmm_products[kernel].block_m), ceil_div(N, aotmm_products[kernel].block_n));
}

/* Tiles of M rows and N columns of all products of a problem; of groups of rows, which the device alone knows, the most that
   there may be. */
static inline int64_t all_tiles_of(uint32_t kernel, const aotmm_problem *p, int64_t M, int64_t N) {
  if (p->grouped != AOTMM_GROUPED_M) return saturated(tiles_of(kernel, M, N), p->batch);
  const int64_t groups = groups_of(p), down = (M > groups ? M - groups : 0) / aotmm_products[kernel].block_m + groups;
  return saturated(down, ceil_div(N, aotmm_products[kernel].block_n));
}

/* Steps along K. */
static inline int64_t steps_of(uint32_t kernel, int64_t K) { return ceil_div(K, aotmm_products[kernel].block_k); }

int sum_guards_hold(uint32_t kernel, const quantities *);
int same_types(uint32_t kernel, const aotmm_problem *);
int32_t epilogue(const aotmm_problem *);
uint32_t grid_of(uint32_t kernel, int64_t work_tiles, const aotmm_device *);
uint32_t helper_grid(uint32_t kernel, const quantities *, const aotmm_device *);
int64_t scratch_of(const aotmm_kernel *, uint32_t grid);
int copies_for(const aotmm_problem *, const quantities *copied, uint32_t copies, const aotmm_device *, int *kernels);
int reduce_for(const aotmm_problem *, const quantities *, const aotmm_device *);

/* ---- order.c */

/* The order in which a product adds up: a class of kernels, NULL for any, the slices of K, 0 for any number, and the largest
   block_k of which these are multiples. */
typedef struct order {
  const char *kernels;
  uint8_t slices, step;
} order;

order order_of(const aotmm_problem *);
int keeps_order(order, uint32_t kernel);

/* ---- time_model.c */

/* `down` times `across` panels of C, each of `rows` rows and `cols` columns; the last ones have fewer. */
typedef struct panels {
  int64_t rows, cols, down, across, last_rows, last_cols;
} panels;

/* One way to place the operands. */
typedef struct placement {
  quantities q;
  uint32_t copies;
  int64_t bytes;              /* of the copies */
  float time;                 /* of copying */
  float lines_a, lines_b;     /* parts of the lines of A and of B that begin within a cache line */
  float sectors_a, sectors_b; /* within a sector of it */
  float hidden[AOTMM_HIDDEN]; /* what the problem adds to the network's hidden nodes, if there is one */
} placement;

/* What the formula takes from a problem; of a grouped one, if its groups were of equal size, or one had all rows. */
typedef struct sizes {
  float batch, M, N, K;
  float bytes_moved; /* A and B read, C written */
} sizes;
enum { ROUTINGS = 2 };

/* As they are; with the copies of A and B that fast kernels need; with that of C, too; these two with one of A along M, or all with
   one of C that need not be; or with one of A or B on whole cache lines. */
enum { PLACEMENTS = 5 };

/* One search for a plan. */
typedef struct query {
  const aotmm_problem *problem; /* of one panel */
  const panels *cut;            /* NULL: one panel is all of it */
  const aotmm_device *device;
  const aotmm_table *table;
  const aotmm_octet *octets; /* as in aotmm_tuning */
  float multiprocessors, in_clusters; /* the device's, and those of them that clusters of more than two blocks can use */
  int64_t limit;       /* of the workspace */
  sizes sizes[ROUTINGS];
  int routings; /* of these; 1 unless rows are in groups */
  const aotmm_network *network; /* of the table; NULL for a grouped product, of which it knows nothing */
  int32_t epilogue;    /* the plainest that the problem needs */
  order order;         /* that a plan has to keep; of the whole problem, not of a panel */
  uint32_t contiguous; /* as in aotmm_alike, of all placements */
  uint32_t needed;     /* copies of A and B that fast kernels need */
  uint32_t excluded;   /* copies that would take more than the limit */
  int first, count;    /* placements that are looked at, from the one without copies on if `first` is 0 */
  placement placements[PLACEMENTS];
  const aotmm_time *measured[2]; /* of this shape, by `relaxed`, then by config; NULL for none */
} query;

/* Return whether a problem allows less exact kernels: fp8 with fast sums, or fp32 rounded to tf32. */
static inline int is_relaxed(const aotmm_problem *p) { return (p->dtype_a == AOTMM_FP32 ? p->allow_tf32 : p->fast_accum) != 0; }

static inline int is_measured(const query *s) { return s->measured[0] || s->measured[1]; }

static inline const aotmm_constants *constants_of(const query *s, uint32_t kernel) {
  return s->table->constants + kernel;
}

/* A plan, before its launches are known. */
typedef struct candidate {
  placement *place;
  uint32_t kernel, split;
  int64_t sum_bytes; /* of partial sums in the workspace */
  float reduce;      /* ns, of the launch that adds them */
} candidate;

/* Predicted times of plans and their parts, in ns without copies, as launcher.h names them. */
typedef struct terms {
  lanes time, fixed, multiply, take, load, read, sums;
  lanes work_tiles, concurrent, waves, rounds, steps, rows, cols;
  int32_t valid[LANES]; /* -1 if K is not split, or into slices that are long enough and few enough, else 0 */
} terms;

float copy_time(const query *, int kernel, const quantities *copy, int together, int element_bytes);
float reduce_time(const query *, int kernel, uint32_t split);
/* Return the multiprocessors that clusters of so many blocks can use. */
int64_t usable(const aotmm_device *, int64_t blocks);
int64_t concurrent_tiles(const query *, uint32_t kernel);
/* Set what the model sees of a placement. */
void describe(const query *, placement *);
/* Fill the octets of a tuning by its constants. */
void set_octets(const aotmm_tuning *);
/* Set the terms of at most LANES plans, by the formula. */
extern void (*set_terms)(const query *, const candidate *, int count, terms *restrict);

/* Of plans that wait to be considered; few problems have more. The last bits of a float hold a plan's number. */
enum { MOST_OCTETS = 64, MOST_PLANS = LANES * MOST_OCTETS, PLAN_NUMBER = MOST_PLANS - 1 };

/* Plans of LANES kernels with equal numbers of slices in one placement. */
typedef struct octet_plans {
  _Alignas(4 * LANES) lanes least; /* with copies, with a reduce of least time, and with PLAN_NUMBER in its last bits; INFINITY:
                                      no plan, or one that was considered */
  lanes time;                      /* without reduce and copies */
  lanes work_tiles;
  placement *place;
  uint32_t siblings, split; /* number of the first kernel's siblings in aotmm_siblings */
} octet_plans;

/* Plans of kernels of equal guards with equal numbers of slices in one placement. */
typedef struct alike_plans {
  uint32_t first, end; /* of their siblings in aotmm_siblings; `first` is a multiple of LANES */
  uint32_t split;
  placement *place;
  float rows;   /* the most that tiles may have */
  float reduce; /* a time that every reduce takes at least */
} alike_plans;

/* Set the octets of these plans, the first of which has this number, and return how many there are. */
extern int (*set_times)(const query *, const alike_plans *, octet_plans *restrict, int number);
/* Return the least `least` of so many octets. */
extern float (*fastest)(const octet_plans *, int count);
enum { SHORTLIST = AOTMM_SHORTLIST };

/* The inputs of the network of LANES plans, those of pdl, and their times by the formula. */
typedef struct plan_inputs {
  lanes of[AOTMM_PLAN_INPUTS], pdl[AOTMM_PDL_INPUTS], time;
} plan_inputs;

/* Set the inputs of at most LANES plans. */
extern void (*set_inputs)(const query *, const candidate *, int count, plan_inputs *restrict);
/* Set the times of some of these plans by the network, and which of them are launched with pdl. `first` is even. */
extern void (*correct)(const query *, const candidate *, const plan_inputs *, int first, int end, lanes time, int pdl[LANES]);
/* Return the measured time of a kernel on this shape, or NULL. */
static inline const aotmm_time *measured_time(const query *s, uint32_t kernel) {
  const aotmm_time *all = is_measured(s) ? s->measured[aotmm_products[kernel].relaxed] : NULL;
  if (!all) return NULL;
  const uint16_t number = s->table->config_numbers[kernel];
  return number != AOTMM_UNMEASURED && all[number].ns ? all + number : NULL;
}

/* ---- tuning.c */

const aotmm_tuning *tuning_for(const aotmm_device *);
uint32_t tuning_generation(void); /* raised by `retune`, which outdates remembered plans */
void find_measured(query *, const aotmm_tuning *);

/* ---- select.c */

/* Return the largest number of slices of K that a plan may have. */
uint32_t slice_limit(const aotmm_problem *);

/* Find the best plan for a valid problem and device. */
int choose(const aotmm_problem *, const aotmm_device *, uint64_t limit, aotmm_plan *);

/* ---- the functions of aotmm_launcher */

int aotmm_check(const aotmm_problem *, const aotmm_device *, uint64_t workspace_limit, uint32_t kernel, aotmm_evaluation *);
int aotmm_select(const aotmm_problem *, const aotmm_device *, uint64_t workspace_limit, aotmm_plan *);
int aotmm_origin_of(const aotmm_device *, aotmm_origin *);
int aotmm_plan_for(const aotmm_problem *, int ordinal, uint64_t workspace_limit, aotmm_plan *);
int aotmm_run(const aotmm_plan *, const aotmm_problem *, int ordinal, void *stream, void *workspace);
int aotmm_load(const aotmm_plan *, const aotmm_problem *, int ordinal);
int aotmm_matmul(const aotmm_problem *, int ordinal, void *stream);
int aotmm_retune(const aotmm_table *);

#endif
