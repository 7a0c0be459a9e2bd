/* smdist.kernel._native: the work of the training thread on a captured step.
 *
 *   copy        copy many ranges of memory and return the guard of the copies
 *   record      copy one range, then write the journal frame with its place and guard
 *   guard       compute the guard of ranges that are in place
 *   statistics  write one row of sufficient statistics per tensor, in one pass over memory
 *   populate    make the pages of a mapping resident before they are needed
 *
 * Addresses come as Python integers, so neither numpy nor torch headers are needed and one
 * limited-API binary serves every Python from 3.10 on.
 *
 * How a tensor is reduced: it is read in chunks that fit the first-level cache. One sweep over a
 * chunk computes sum, sum of squares, sum of magnitudes (double), min, max, least magnitude (native
 * type) and the number of zeros. Two more sweeps run over the cached chunk, only when needed:
 *   - deviations from the chunk's mean, when sum of squares and sum would cancel,
 *   - counting of NaN and infinities, when the sum of magnitudes is not finite.
 * Chunks are merged by Chan's formula, sums with Neumaier's compensation.
 *
 * The sweeps are in _native_variants.h, which is included once per instruction set. Two alternatives
 * fail: gcc splits wide vectors before it inlines an always-inline body into functions of several
 * targets, and `target_clones` needs ifunc, which musl and macOS lack.
 */

#define PY_SSIZE_T_CLEAN
#include <pyconfig.h>
#if !defined(Py_LIMITED_API) && !defined(Py_GIL_DISABLED)
#define Py_LIMITED_API 0x030A0000
#endif
#include <Python.h>

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __FAST_MATH__
#error "NaN and infinity are data here: build without -ffast-math"
#endif

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define HAVE_AVX2_VARIANT 1
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

/* Below this many bytes the GIL is kept. The work takes tens of microseconds, but getting the GIL back
 * from a busy Python thread can take a whole switch interval (5 ms). */
#define KEEP_GIL_BYTES (256 * 1024)

/* ---- dtypes ------------------------------------------------------------------------------ */

/* The codes of safetensors, and three more one-byte floats. The one-byte types come last. */
typedef enum {
    F64, F32, F16, BF16, I64, I32, I16, U64, U32, U16,
    I8, U8, BOOL, F8_E4M3, F8_E5M2, F8_E4M3FNUZ, F8_E5M2FNUZ, F8_E8M0, DTYPES
} Dtype;

static const char *const DTYPE_NAMES[DTYPES] = {
    "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "U64", "U32", "U16",
    "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0",
};

INLINE size_t dtype_bytes(Dtype dtype) {
    static const uint8_t wide[] = {8, 4, 2, 2, 8, 4, 2, 8, 4, 2};
    return dtype < I8 ? wide[dtype] : 1;
}

/* ---- a row ------------------------------------------------------------------------------- */

enum { COUNT, NANS, INFS, ZEROS, SUM, M2, ABS_SUM, MIN, MAX, ABS_MIN, COLUMNS };

typedef struct {
    uint64_t count, nans, infs, zeros;
    double sum, sum_rest, abs_sum, abs_sum_rest; /* value = sum + sum_rest */
    double m2, min, max, abs_min;
    double origin, shifted; /* the first chunk's mean; sum of (element - origin) */
} Row;

/* Result of the first sweep over a chunk; min, max and abs_min are undefined when it has NaN. */
typedef struct {
    double sum, squares, abs_sum, min, max, abs_min;
    uint64_t zeros;
} Sweep;

typedef struct {
    double m2, rest; /* squared deviations from the mean; sum of deviations from the rounded one */
} Deviations;

INLINE int is_finite(double x) { return x - x == 0.0; }

INLINE void add_compensated(double *sum, double *rest, double x) {
    double total = *sum + x;
    if (is_finite(total)) {
        double a = __builtin_fabs(*sum), b = __builtin_fabs(x);
        *rest += a >= b ? (*sum - total) + x : (x - total) + *sum;
    }
    *sum = total;
}

INLINE double compensated(double sum, double rest) { return is_finite(sum) ? sum + rest : sum; }

INLINE void row_begin(Row *row) {
    memset(row, 0, sizeof *row);
    row->min = row->abs_min = __builtin_inf();
    row->max = -__builtin_inf();
}

/* Add `n` swept elements. Means are compared as distances from one origin: of means near 1e9 the
 * difference itself would have no more than 7 decimals. */
INLINE void row_merge(Row *row, const Sweep *part, uint64_t n, Deviations deviations) {
    double a = (double)row->count, b = (double)n, mean = part->sum / b;
    if (!row->count) row->origin = mean;
    double offset = (mean - row->origin) + deviations.rest / b;
    row->m2 += deviations.m2;
    if (row->count) {
        double delta = offset - row->shifted / a;
        row->m2 += delta * delta * (a / (a + b) * b);
    }
    row->shifted += offset * b;
    row->count += n;
    row->zeros += part->zeros;
    add_compensated(&row->sum, &row->sum_rest, part->sum);
    add_compensated(&row->abs_sum, &row->abs_sum_rest, part->abs_sum);
    if (part->min < row->min) row->min = part->min;
    if (part->max > row->max) row->max = part->max;
    if (part->abs_min < row->abs_min) row->abs_min = part->abs_min;
}

static void row_store(const Row *row, char *out) {
    double nan = __builtin_nan("");
    double values[COLUMNS] = {
        [COUNT] = (double)row->count,
        [NANS] = (double)row->nans,
        [INFS] = (double)row->infs,
        [ZEROS] = (double)row->zeros,
        [SUM] = compensated(row->sum, row->sum_rest),
        [M2] = row->infs ? nan : row->m2,
        [ABS_SUM] = compensated(row->abs_sum, row->abs_sum_rest),
        [MIN] = row->min,
        [MAX] = row->max,
        [ABS_MIN] = row->abs_min,
    };
    if (row->nans)
        for (int column = SUM; column < COLUMNS; column++) values[column] = nan;
    memcpy(out, values, sizeof values);
}

/* ---- sweeps ------------------------------------------------------------------------------ */

#define CHUNK_BYTES 16384
#define CHUNK_F32 (CHUNK_BYTES / 4)
#define CHUNK_F64 (CHUNK_BYTES / 8)

/* With less than 12 of 53 bits cancelled, `squares - sum * sum / n` keeps 40 good bits. */
#define CANCELLATION 0x1p-12

#define F32_MAGNITUDE INT32_C(0x7fffffff)
#define F32_INFINITY INT32_C(0x7f800000)
#define F64_MAGNITUDE INT64_C(0x7fffffffffffffff)
#define F64_INFINITY INT64_C(0x7ff0000000000000)

/* A half's exponent and mantissa are moved into place, and the exponent up by 112; infinity and
 * NaN once more. A subnormal is its mantissa as an integer, scaled. */
INLINE float f16_value(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t bits = magnitude + (112u << 23) + (magnitude >= 31u << 23 ? 112u << 23 : 0);
    float small = (float)(half & 0x3ff) * 0x1p-24f, value;
    uint32_t small_bits;
    memcpy(&small_bits, &small, 4);
    bits = (magnitude < 1u << 23 ? small_bits : bits) | sign;
    memcpy(&value, &bits, 4);
    return value;
}

/* ---- guard --------------------------------------------------------------------------------
 *
 * A short checksum of captured bytes. The training process writes it to the journal and the uploader
 * computes it again from the bytes it stores. It detects a range that was allocated twice.
 *
 * Ranges up to 2 KiB are covered entirely. Larger ones are covered by the first word of each 512 bytes
 * and the last word. Parts of up to 512 bytes travel in the journal, so a part in the arena that
 * overwrites another one overwrites at least one of these words. (Exception: while a device copies,
 * small parts are in the arena too and may fall between two words.)
 *
 * Each word is mixed with its position, then all are added. So the sum can be computed in vectors, in
 * numpy, and range by range. */
#define GUARD_WHOLE 2048
#define GUARD_STRIDE 512
#define GUARD_KEY UINT64_C(0x9E3779B97F4A7C15)
static const uint64_t GUARD_LANES[4] = {0, 8 * GUARD_KEY, 16 * GUARD_KEY, 24 * GUARD_KEY};

INLINE uint64_t word_at(const char *at) {
    uint64_t word;
    memcpy(&word, at, sizeof word);
    return word;
}

INLINE uint64_t guard_word(uint64_t word, uint64_t position) {
    uint64_t mixed = word ^ (position + 1) * GUARD_KEY;
    return word + (mixed & UINT32_MAX) * (mixed >> 32);
}

/* `sum` covers the words before the last one. */
INLINE uint32_t guard_close(uint64_t sum, const char *data, size_t size, uint64_t position) {
    uint64_t last = 0;
    size_t bytes = size < sizeof last ? size : sizeof last;
    memcpy(&last, data + size - bytes, bytes);
    sum += guard_word(last, position + size);
    return (uint32_t)(sum ^ sum >> 32);
}

#define PASTE(a, b) a##_##b
#define PASTE_EXPANDED(a, b) PASTE(a, b)
#define FN(name) PASTE_EXPANDED(name, VARIANT)
#define VECTOR(type, bytes) type __attribute__((vector_size(bytes)))

#define VARIANT baseline
#define VARIANT_TARGET
#define WIDTH 16
#include "_native_variants.h"

#ifdef HAVE_AVX2_VARIANT
#define VARIANT avx2
#define VARIANT_TARGET __attribute__((target("avx2,fma,f16c")))
#define VARIANT_AVX2
#define WIDTH 32
#include "_native_variants.h"
#endif

/* ---- one-byte types ---------------------------------------------------------------------- */

static double power_of_two(int exponent) {
    double value = 1.0;
    for (; exponent > 0; exponent--) value *= 2.0;
    for (; exponent < 0; exponent++) value *= 0.5;
    return value;
}

/* Sign, `exponent_bits`, mantissa; `special` is the least magnitude that is infinite or NaN. */
static double f8_value(unsigned byte, int exponent_bits, int bias, unsigned special, int infinity) {
    int mantissa_bits = 7 - exponent_bits;
    unsigned magnitude = byte & 0x7f, mantissa = magnitude & ((1u << mantissa_bits) - 1);
    int exponent = (int)(magnitude >> mantissa_bits);
    double sign = byte & 0x80 ? -1.0 : 1.0;
    if (magnitude >= special)
        return infinity && magnitude == special ? sign * __builtin_inf() : __builtin_nan("");
    if (exponent) mantissa += 1u << mantissa_bits;
    return sign * mantissa * power_of_two((exponent ? exponent : 1) - bias - mantissa_bits);
}

static double BYTE_VALUES[DTYPES - I8][256]; /* filled once, when the module is loaded */

static void fill_byte_values(void) {
    double nan = __builtin_nan("");
    for (unsigned byte = 0; byte < 256; byte++) {
        BYTE_VALUES[I8 - I8][byte] = (int8_t)byte;
        BYTE_VALUES[U8 - I8][byte] = byte;
        BYTE_VALUES[BOOL - I8][byte] = byte != 0;
        BYTE_VALUES[F8_E4M3 - I8][byte] = f8_value(byte, 4, 7, 0x7f, 0);
        BYTE_VALUES[F8_E5M2 - I8][byte] = f8_value(byte, 5, 15, 0x7c, 1);
        /* "FNUZ": no infinities; the bits of negative zero are the only NaN */
        BYTE_VALUES[F8_E4M3FNUZ - I8][byte] = byte == 0x80 ? nan : f8_value(byte, 4, 8, 0x80, 0);
        BYTE_VALUES[F8_E5M2FNUZ - I8][byte] = byte == 0x80 ? nan : f8_value(byte, 5, 16, 0x80, 0);
        BYTE_VALUES[F8_E8M0 - I8][byte] = byte == 0xff ? nan : power_of_two((int)byte - 127);
    }
}

/* One-byte types have 256 values, so a histogram is enough. Four histograms, because counting equal
 * neighbours in one would wait for the previous store. */
static void reduce_bytes(const unsigned char *data, uint64_t count, const double *values, Row *row) {
    uint64_t seen[4][256];
    memset(seen, 0, sizeof seen);
    uint64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        seen[0][data[i]]++;
        seen[1][data[i + 1]]++;
        seen[2][data[i + 2]]++;
        seen[3][data[i + 3]]++;
    }
    for (; i < count; i++) seen[0][data[i]]++;
    for (int byte = 0; byte < 256; byte++) {
        uint64_t times = seen[0][byte] + seen[1][byte] + seen[2][byte] + seen[3][byte];
        seen[0][byte] = times;
        if (!times) continue;
        double value = values[byte], magnitude = __builtin_fabs(value);
        if (value != value) row->nans += times;
        if (magnitude == __builtin_inf()) row->infs += times;
        if (value == 0.0) row->zeros += times;
        row->sum += value * (double)times;
        row->abs_sum += magnitude * (double)times;
        if (value < row->min) row->min = value;
        if (value > row->max) row->max = value;
        if (magnitude < row->abs_min) row->abs_min = magnitude;
    }
    double mean = row->sum / (double)count;
    for (int byte = 0; byte < 256; byte++) {
        if (!seen[0][byte]) continue;
        double deviation = values[byte] - mean;
        row->m2 += deviation * deviation * (double)seen[0][byte];
    }
    row->count = count;
}

/* ---- whole tensors ----------------------------------------------------------------------- */

typedef struct {
    const char *data;
    uint64_t count;
    Dtype dtype;
} Item;

/* Adds `count` elements of one dtype, at most a chunk of them, to the row. */
typedef void (*ChunkReducer)(const char *, size_t, Row *);

typedef struct {
    ChunkReducer f64, f32, f16, bf16, i64, i32, i16, u64, u32, u16;
    uint64_t (*guard_words)(const char *, size_t, uint64_t);
    uint32_t (*crc32c)(const unsigned char *, size_t);
} Variant;

#define VARIANT_TABLE(name)                                                         \
    {                                                                               \
        reduce_f64_##name, reduce_f32_##name, reduce_f16_##name, reduce_bf16_##name, \
        reduce_i64_##name, reduce_i32_##name, reduce_i16_##name, reduce_u64_##name, \
        reduce_u32_##name, reduce_u16_##name, guard_words_##name, crc32c_##name,    \
    }

static const Variant BASELINE = VARIANT_TABLE(baseline);
#ifdef HAVE_AVX2_VARIANT
static const Variant AVX2 = VARIANT_TABLE(avx2);
#endif
static const Variant *variant = &BASELINE;

static ChunkReducer chunk_reducer(Dtype dtype) {
    switch (dtype) {
        case F64: return variant->f64;
        case F32: return variant->f32;
        case F16: return variant->f16;
        case BF16: return variant->bf16;
        case I64: return variant->i64;
        case I32: return variant->i32;
        case I16: return variant->i16;
        case U64: return variant->u64;
        case U32: return variant->u32;
        case U16: return variant->u16;
        default: return NULL;
    }
}

static void reduce(const Item *item, Row *row) {
    row_begin(row);
    if (!item->count) return;
    ChunkReducer reducer = chunk_reducer(item->dtype);
    if (!reducer) {
        reduce_bytes((const unsigned char *)item->data, item->count, BYTE_VALUES[item->dtype - I8], row);
        return;
    }
    /* two-byte types are widened to four, integers of four bytes to eight */
    size_t bytes = dtype_bytes(item->dtype);
    size_t most = bytes == 2 || item->dtype == F32 ? CHUNK_F32 : CHUNK_F64;
    for (uint64_t at = 0; at < item->count; at += most) {
        uint64_t left = item->count - at;
        reducer(item->data + at * bytes, left < most ? (size_t)left : most, row);
    }
}

/* torch.set_flush_denormal(True) makes arithmetic on the training thread treat subnormal numbers as
 * zero. Statistics describe the memory, so they are computed in the default mode. */
#if defined(__x86_64__)
typedef unsigned int FloatMode;
INLINE FloatMode float_mode_default(void) {
    FloatMode before = _mm_getcsr();
    _mm_setcsr(0x1f80);
    return before;
}
INLINE void float_mode_restore(FloatMode before) { _mm_setcsr(before); }
#elif defined(__aarch64__)
typedef uint64_t FloatMode;
INLINE FloatMode float_mode_default(void) {
    FloatMode before, standard = 0;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(standard) : "memory");
    return before;
}
INLINE void float_mode_restore(FloatMode before) {
    __asm__ volatile("msr fpcr, %0" : : "r"(before) : "memory");
}
#else
typedef int FloatMode;
INLINE FloatMode float_mode_default(void) { return 0; }
INLINE void float_mode_restore(FloatMode before) { (void)before; }
#endif

/* ---- arguments --------------------------------------------------------------------------- */

typedef struct {
    PyObject *object; /* a list or tuple, owned when it had to be made */
    int owned, is_list;
    Py_ssize_t length;
} Items;

static int items_open(Items *items, PyObject *object) {
    items->object = object;
    items->owned = 0;
    items->is_list = PyList_Check(object);
    if (!items->is_list && !PyTuple_Check(object)) {
        items->object = PySequence_List(object);
        if (!items->object) return -1;
        items->owned = items->is_list = 1;
    }
    items->length = items->is_list ? PyList_Size(items->object) : PyTuple_Size(items->object);
    return 0;
}

static void items_close(Items *items) {
    if (items->owned) Py_DECREF(items->object);
}

/* Borrowed. A list can shrink only while Python code runs, and `as_uint64` runs none: it takes
 * integers, not objects with __index__. */
static PyObject *items_get(const Items *items, Py_ssize_t i) {
    return items->is_list ? PyList_GetItem(items->object, i) : PyTuple_GetItem(items->object, i);
}

static int as_uint64(PyObject *object, uint64_t *out) {
    if (!object) return -1;
    Py_ssize_t value = PyLong_AsSsize_t(object); /* three times as fast as the unsigned ones */
    if (value < 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "negative address or size");
        return -1;
    }
    *out = (uint64_t)value;
    return 0;
}

static int items_uint64(const Items *items, Py_ssize_t i, uint64_t *out) {
    return as_uint64(items_get(items, i), out);
}

static int dtype_parse(PyObject *object, Py_ssize_t index, Dtype *out) {
    Py_ssize_t size;
    const char *name = object ? PyUnicode_AsUTF8AndSize(object, &size) : NULL;
    if (!name) return -1;
    for (int dtype = 0; dtype < DTYPES; dtype++)
        if (!strcmp(name, DTYPE_NAMES[dtype])) {
            *out = (Dtype)dtype;
            return 0;
        }
    PyErr_Format(PyExc_ValueError, "tensor %zd: no statistics for dtype %R", index, object);
    return -1;
}

static int arguments(const char *name, Py_ssize_t given, Py_ssize_t wanted) {
    if (given == wanted) return 0;
    PyErr_Format(PyExc_TypeError, "%s() takes %zd arguments (%zd given)", name, wanted, given);
    return -1;
}

static int equal_lengths(const char *name, const Items *items, int n) {
    for (int i = 1; i < n; i++)
        if (items[i].length != items[0].length) {
            PyErr_Format(PyExc_ValueError, "%s(): sequences of different lengths (%zd and %zd)",
                         name, items[0].length, items[i].length);
            return -1;
        }
    return 0;
}

static int items_open_all(Items *items, PyObject *const *args, int n) {
    for (int i = 0; i < n; i++)
        if (items_open(&items[i], args[i]) < 0) {
            while (i--) items_close(&items[i]);
            return -1;
        }
    return 0;
}

static int not_null(uint64_t address, uint64_t bytes, Py_ssize_t index) {
    if (address || !bytes) return 0;
    PyErr_Format(PyExc_ValueError, "tensor %zd: null address", index);
    return -1;
}

/* ---- copy -------------------------------------------------------------------------------- */

typedef struct {
    char *target;
    const char *source;
    size_t size;
} Move;

static int moves_parse(const Items *items, Move *moves, uint64_t *total) {
    for (Py_ssize_t i = 0; i < items[0].length; i++) {
        uint64_t target, source, size;
        if (items_uint64(&items[0], i, &target) < 0 || items_uint64(&items[1], i, &source) < 0 ||
            items_uint64(&items[2], i, &size) < 0 || not_null(target, size, i) < 0 ||
            not_null(source, size, i) < 0)
            return -1;
        moves[i] = (Move){(char *)(uintptr_t)target, (const char *)(uintptr_t)source, (size_t)size};
        *total += size;
    }
    return 0;
}

/* From this size on the copy bypasses the caches: this core does not read it again. So it does not
 * evict the data of training, and memory need not be read before it is written.
 * Measured (2.8 GHz EPYC, ranges of 272 KB and 3 MB): 0.65 to 0.7 of memcpy's time. */
#define STREAM_BYTES (64 * 1024)
#define STREAM_BLOCK 4096

/* The guard's words are read from the source: the target is not in a cache. */
static uint32_t move_large(char *target, const char *source, size_t size, uint64_t position) {
    uint64_t sum = 0;
    size_t at = 0; /* of the next word for the guard */
#if defined(__x86_64__)
    size_t head = (size_t)(-(uintptr_t)target & 15), i = head;
    memcpy(target, source, head);
    for (; i + 64 <= size; i += 64) {
        if (i >= at) {
            sum += guard_word(word_at(source + at), position + at);
            at += GUARD_STRIDE;
        }
        __m128i a = _mm_loadu_si128((const __m128i *)(source + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(source + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + i + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + i + 48));
        _mm_stream_si128((__m128i *)(target + i), a);
        _mm_stream_si128((__m128i *)(target + i + 16), b);
        _mm_stream_si128((__m128i *)(target + i + 32), c);
        _mm_stream_si128((__m128i *)(target + i + 48), d);
    }
    _mm_sfence(); /* the journal record that names these bytes comes after them */
    memcpy(target + i, source + i, size - i);
#else
    for (; at + STREAM_BLOCK <= size; ) {
        memcpy(target + at, source + at, STREAM_BLOCK);
        for (size_t end = at + STREAM_BLOCK; at < end; at += GUARD_STRIDE)
            sum += guard_word(word_at(source + at), position + at);
    }
    memcpy(target + at, source + at, size - at);
#endif
    for (; at + 8 <= size; at += GUARD_STRIDE)
        sum += guard_word(word_at(source + at), position + at);
    return guard_close(sum, source, size, position);
}

static uint32_t guard_of(const char *data, size_t size, uint64_t position) {
    uint64_t sum = 0;
    if (!size) return 0;
    if (size <= GUARD_WHOLE)
        sum = variant->guard_words(data, size, position);
    else
        for (size_t at = 0; at + 8 <= size; at += GUARD_STRIDE)
            sum += guard_word(word_at(data + at), position + at);
    return guard_close(sum, data, size, position);
}

/* Positions are counted from `origin`. */
typedef uint32_t (*MovesRunner)(const Move *, Py_ssize_t, uint64_t origin);

static uint32_t moves_run(const Move *moves, Py_ssize_t n, uint64_t origin) {
    uint32_t guard = 0;
    for (const Move *move = moves; move < moves + n; move++) {
        uint64_t position = (uint64_t)(uintptr_t)move->target - origin;
        if (move->size >= STREAM_BYTES)
            guard += move_large(move->target, move->source, move->size, position);
        else if (move->size) {
            memcpy(move->target, move->source, move->size);
            guard += guard_of(move->target, move->size, position);
        }
    }
    return guard;
}

static uint32_t moves_guard(const Move *moves, Py_ssize_t n, uint64_t origin) {
    uint32_t guard = 0;
    for (const Move *move = moves; move < moves + n; move++)
        guard += guard_of(move->target, move->size, (uint64_t)(uintptr_t)move->target - origin);
    return guard;
}

/* `args`: targets, sources, sizes. The guard of several ranges is the sum of their guards. */
static PyObject *moves_call(const char *name, PyObject *const *args, PyObject *from, MovesRunner run) {
    Items items[3];
    Move few[32], *moves = few;
    uint64_t total = 0, origin;
    uint32_t guard = 0;
    int failed = -1;
    if (as_uint64(from, &origin) < 0 || items_open_all(items, args, 3) < 0) return NULL;
    Py_ssize_t n = items[0].length;
    if (equal_lengths(name, items, 3) < 0) goto done;
    if (n > 32 && !(moves = PyMem_Malloc((size_t)n * sizeof *moves))) {
        PyErr_NoMemory();
        goto done;
    }
    failed = moves_parse(items, moves, &total);
    if (failed) goto done;
    if (total <= KEEP_GIL_BYTES)
        guard = run(moves, n, origin);
    else {
        Py_BEGIN_ALLOW_THREADS
        guard = run(moves, n, origin);
        Py_END_ALLOW_THREADS
    }
done:
    if (moves != few) PyMem_Free(moves);
    for (int i = 0; i < 3; i++) items_close(&items[i]);
    return failed ? NULL : PyLong_FromUnsignedLong(guard);
}

static PyObject *kernel_copy(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arguments("copy", nargs, 4) < 0) return NULL;
    return moves_call("copy", args, args[3], moves_run);
}

static PyObject *kernel_guard(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    if (arguments("guard", nargs, 3) < 0) return NULL;
    PyObject *const in_place[3] = {args[0], args[0], args[1]};
    return moves_call("guard", in_place, args[2], moves_guard);
}

/* ---- record ------------------------------------------------------------------------------ */

#define FRAME_HEAD 8  /* length and checksum of the payload, little endian */
#define MAX_OPENING 32
#define PAYLOAD_REST 33

/* Append a msgpack number: the type byte, then the value in `bytes` bytes, big endian. */
static unsigned char *pack(unsigned char *at, unsigned char what, uint64_t value, int bytes) {
    *at++ = what;
    while (bytes--) *at++ = (unsigned char)(value >> 8 * bytes);
    return at;
}

typedef struct {
    const char *opening;
    Py_ssize_t opening_bytes;
    double when;
    uint64_t kind, arena, offset;
    uint32_t guard;
} Record;

/* Address and ordinal of the next journal frame. Advanced here and not by the caller: a signal handler
 * may run as soon as the call returns, and must not overwrite the frame. */
typedef struct {
    uint64_t frame, ordinal;
} Cursor;

/* Writes the head last: until then a concurrent reader finds length 0, which means no frame. */
static void frame_write(Cursor *cursor, const Record *record) {
    char *frame = (char *)(uintptr_t)cursor->frame;
    unsigned char payload[MAX_OPENING + PAYLOAD_REST], head[FRAME_HEAD], *at = payload;
    uint64_t when;
    memcpy(&when, &record->when, sizeof when);
    memcpy(at, record->opening, (size_t)record->opening_bytes);
    at = pack(at + record->opening_bytes, 0xcb, when, 8);
    at = pack(at, 0xce, record->kind, 4);
    at = pack(at, 0xce, record->arena, 4);
    at = pack(at, 0xcf, record->offset, 8);
    at = pack(at, 0xce, record->guard, 4);
    size_t length = (size_t)(at - payload);
    uint64_t both = (uint64_t)variant->crc32c(payload, length) << 32 | length;
    for (int i = 0; i < FRAME_HEAD; i++) head[i] = (unsigned char)(both >> 8 * i);
    memcpy(frame + FRAME_HEAD, payload, length);
    memcpy(&both, head, sizeof both);
    __atomic_store_n((uint64_t *)(void *)frame, both, __ATOMIC_RELEASE);
    cursor->frame += FRAME_HEAD + (length + 7) / 8 * 8;
    cursor->ordinal++;
}

static PyObject *kernel_record(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    Record record;
    uint64_t target, source, size, place;
    char *opening;
    if (arguments("record", nargs, 9) < 0 || as_uint64(args[0], &target) < 0 ||
        as_uint64(args[1], &source) < 0 || as_uint64(args[2], &size) < 0 ||
        as_uint64(args[3], &place) < 0 ||
        PyBytes_AsStringAndSize(args[4], &opening, &record.opening_bytes) < 0 ||
        as_uint64(args[6], &record.kind) < 0 || as_uint64(args[7], &record.arena) < 0 ||
        as_uint64(args[8], &record.offset) < 0)
        return NULL;
    record.opening = opening;
    record.when = PyFloat_AsDouble(args[5]);
    if (record.when == -1.0 && PyErr_Occurred()) return NULL;
    Cursor *cursor = (Cursor *)(uintptr_t)place;
    if (!cursor || !cursor->frame || cursor->frame % FRAME_HEAD || (size && !(target && source)) ||
        record.opening_bytes > MAX_OPENING || record.kind > UINT32_MAX ||
        record.arena > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "record(): invalid argument (null or unaligned address, or value out of range)");
        return NULL;
    }
    Move move = {(char *)(uintptr_t)target, (const char *)(uintptr_t)source, (size_t)size};
    if (size <= KEEP_GIL_BYTES)
        record.guard = moves_run(&move, 1, target);
    else {
        Py_BEGIN_ALLOW_THREADS
        record.guard = moves_run(&move, 1, target);
        Py_END_ALLOW_THREADS
    }
    frame_write(cursor, &record);
    Py_RETURN_NONE;
}

/* ---- statistics -------------------------------------------------------------------------- */

static int tensors_parse(const Items *items, Item *tensors, uint64_t *total) {
    PyObject *last = NULL;
    Dtype dtype = F32;
    for (Py_ssize_t i = 0; i < items[0].length; i++) {
        uint64_t address, count;
        PyObject *name = items_get(&items[2], i);
        /* neighbours mostly share one interned string */
        if (name != last && dtype_parse(name, i, &dtype) < 0) return -1;
        last = name;
        if (items_uint64(&items[0], i, &address) < 0 || items_uint64(&items[1], i, &count) < 0 ||
            not_null(address, count, i) < 0)
            return -1;
        tensors[i] = (Item){(const char *)(uintptr_t)address, count, dtype};
        *total += count * dtype_bytes(dtype);
    }
    return 0;
}

static void tensors_run(const Item *tensors, Py_ssize_t n, char *out, uint64_t stride) {
    FloatMode mode = float_mode_default();
    for (Py_ssize_t i = 0; i < n; i++) {
        Row row;
        reduce(&tensors[i], &row);
        row_store(&row, out + (uint64_t)i * stride);
    }
    float_mode_restore(mode);
}

static PyObject *kernel_statistics(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    Items items[3];
    Item few[32], *tensors = few;
    uint64_t total = 0, out, stride;
    int failed = -1;
    if (arguments("statistics", nargs, 5) < 0 || as_uint64(args[3], &out) < 0 ||
        as_uint64(args[4], &stride) < 0 || items_open_all(items, args, 3) < 0)
        return NULL;
    Py_ssize_t n = items[0].length;
    if (equal_lengths("statistics", items, 3) < 0) goto done;
    if (n && (!out || stride < COLUMNS * sizeof(double))) {
        PyErr_Format(PyExc_ValueError, "statistics(): null `out`, or `stride` below %zd",
                     (Py_ssize_t)(COLUMNS * sizeof(double)));
        goto done;
    }
    if (n > 32 && !(tensors = PyMem_Malloc((size_t)n * sizeof *tensors))) {
        PyErr_NoMemory();
        goto done;
    }
    failed = tensors_parse(items, tensors, &total);
    if (failed) goto done;
    if (total <= KEEP_GIL_BYTES)
        tensors_run(tensors, n, (char *)(uintptr_t)out, stride);
    else {
        Py_BEGIN_ALLOW_THREADS
        tensors_run(tensors, n, (char *)(uintptr_t)out, stride);
        Py_END_ALLOW_THREADS
    }
done:
    if (tensors != few) PyMem_Free(tensors);
    for (int i = 0; i < 3; i++) items_close(&items[i]);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

/* ---- fingerprints ------------------------------------------------------------------------ */

/* An odd weight per element: a changed bit always changes the sum, and order matters. Elements of 64
   bits are mixed first: weighted as they are, two flips of the topmost bit would cancel each other. */
INLINE uint64_t fingerprint_weight(uint64_t i) {
    uint64_t z = i + 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return (z ^ z >> 31) | 1;
}

INLINE uint64_t fingerprint_mix(uint64_t bits) {
    bits *= 0x9e3779b97f4a7c15;
    return bits ^ bits >> 32;
}

#define DEFINE_FINGERPRINT(type)                                                      \
    static uint64_t fingerprint_##type(const char *data, uint64_t n, uint64_t first) { \
        uint64_t sum = 0;                                                             \
        for (uint64_t i = 0; i < n; i++) {                                            \
            type bits;                                                                \
            memcpy(&bits, data + sizeof bits * i, sizeof bits);                       \
            uint64_t value = sizeof bits == 8 ? fingerprint_mix(bits) : bits;         \
            sum += fingerprint_weight(first + i) * value;                             \
        }                                                                             \
        return sum;                                                                   \
    }

DEFINE_FINGERPRINT(uint8_t)
DEFINE_FINGERPRINT(uint16_t)
DEFINE_FINGERPRINT(uint32_t)
DEFINE_FINGERPRINT(uint64_t)

/* `sums` holds the index of each first element, and then the fingerprint. */
static void fingerprints_run(const Item *tensors, Py_ssize_t n, uint64_t *sums) {
    for (Py_ssize_t i = 0; i < n; i++) {
        const Item *item = &tensors[i];
        switch (dtype_bytes(item->dtype)) {
            case 1: sums[i] = fingerprint_uint8_t(item->data, item->count, sums[i]); break;
            case 2: sums[i] = fingerprint_uint16_t(item->data, item->count, sums[i]); break;
            case 4: sums[i] = fingerprint_uint32_t(item->data, item->count, sums[i]); break;
            default: sums[i] = fingerprint_uint64_t(item->data, item->count, sums[i]);
        }
    }
}

static PyObject *sums_list(const uint64_t *sums, Py_ssize_t n) {
    PyObject *list = PyList_New(n);
    for (Py_ssize_t i = 0; list && i < n; i++) {
        PyObject *sum = PyLong_FromUnsignedLongLong(sums[i]);
        if (!sum || PyList_SetItem(list, i, sum) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *kernel_fingerprint(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    Items items[4];
    uint64_t total = 0;
    PyObject *found = NULL;
    if (arguments("fingerprint", nargs, 4) < 0 || items_open_all(items, args, 4) < 0) return NULL;
    Py_ssize_t n = items[0].length;
    Item *tensors = PyMem_Malloc((size_t)(n + 1) * sizeof *tensors);
    uint64_t *sums = PyMem_Malloc((size_t)(n + 1) * sizeof *sums);
    if (!tensors || !sums) {
        PyErr_NoMemory();
        goto done;
    }
    if (equal_lengths("fingerprint", items, 4) < 0 || tensors_parse(items, tensors, &total) < 0)
        goto done;
    for (Py_ssize_t i = 0; i < n; i++)
        if (items_uint64(&items[3], i, &sums[i]) < 0) goto done;
    if (total <= KEEP_GIL_BYTES)
        fingerprints_run(tensors, n, sums);
    else {
        Py_BEGIN_ALLOW_THREADS
        fingerprints_run(tensors, n, sums);
        Py_END_ALLOW_THREADS
    }
    found = sums_list(sums, n);
done:
    PyMem_Free(tensors);
    PyMem_Free(sums);
    for (int i = 0; i < 4; i++) items_close(&items[i]);
    return found;
}

/* ---- populate ---------------------------------------------------------------------------- */

#if defined(__linux__)
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#endif

static void touch(uintptr_t from, uintptr_t to, uintptr_t page) {
    for (uintptr_t at = from; at < to; at += page)
        __atomic_fetch_or((unsigned char *)at, (unsigned char)0, __ATOMIC_RELAXED);
}

/* Return 0, or the errno when the pages are not available (touching them would raise SIGBUS). */
static int populate_range(uintptr_t from, uintptr_t to, uintptr_t page) {
#ifdef MADV_POPULATE_WRITE
    uintptr_t aligned = from & ~(page - 1);
    size_t size = (size_t)(((to + page - 1) & ~(page - 1)) - aligned);
    for (;;) {
        if (madvise((void *)aligned, size, MADV_POPULATE_WRITE) == 0) return 0;
        if (errno == EINVAL) break; /* Linux before 5.14, or a mapping that is not supported */
        if (errno != EINTR && errno != EAGAIN) return errno;
    }
#endif
    touch(from, from + 1, page);
    touch((from & ~(page - 1)) + page, to, page);
    return 0;
}

static PyObject *kernel_populate(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    (void)module;
    uint64_t address, bytes;
    int error = 0;
    if (arguments("populate", nargs, 2) < 0 || as_uint64(args[0], &address) < 0 ||
        as_uint64(args[1], &bytes) < 0 || not_null(address, bytes, 0) < 0)
        return NULL;
    if (bytes) {
        uintptr_t from = (uintptr_t)address, page = (uintptr_t)sysconf(_SC_PAGESIZE);
        Py_BEGIN_ALLOW_THREADS
        error = populate_range(from, from + (uintptr_t)bytes, page);
        Py_END_ALLOW_THREADS
    }
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

/* ---- module ------------------------------------------------------------------------------ */

static int avx2_here(void) {
#ifdef HAVE_AVX2_VARIANT
    /* Not `__builtin_cpu_supports`: it needs a runtime symbol that some toolchains do not link. */
    unsigned a, b, c, d, saved, unused;
    const unsigned wanted = bit_FMA | bit_F16C | bit_OSXSAVE | bit_AVX;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & wanted) != wanted) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    return (saved & 6) == 6; /* the operating system saves the wide registers */
#else
    return 0;
#endif
}

static PyObject *kernel_use(PyObject *module, PyObject *name) {
    (void)module;
    Py_ssize_t size;
    const char *text = PyUnicode_AsUTF8AndSize(name, &size);
    if (!text) return NULL;
    if (!strcmp(text, "baseline"))
        variant = &BASELINE;
#ifdef HAVE_AVX2_VARIANT
    else if (!strcmp(text, "avx2") && avx2_here())
        variant = &AVX2;
#endif
    else
        return PyErr_Format(PyExc_ValueError, "no variant %R of the kernel on this machine", name);
    Py_RETURN_NONE;
}

static PyObject *kernel_variants(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return avx2_here() ? Py_BuildValue("(ss)", "avx2", "baseline") : Py_BuildValue("(s)", "baseline");
}

static PyMethodDef METHODS[] = {
    {"copy", (PyCFunction)(void (*)(void))kernel_copy, METH_FASTCALL,
     "copy(targets, sources, sizes, origin, /)\n--\n\n"
     "Copy many ranges of memory that do not overlap; return the guard of the copies."},
    {"guard", (PyCFunction)(void (*)(void))kernel_guard, METH_FASTCALL,
     "guard(addresses, sizes, origin, /)\n--\n\nReturn the guard of ranges that are in place."},
    {"record", (PyCFunction)(void (*)(void))kernel_record, METH_FASTCALL,
     "record(target, source, size, cursor, opening, when, kind, arena, offset, /)\n--\n\n"
     "Copy, then write the journal frame of the copy and advance the cursor."},
    {"statistics", (PyCFunction)(void (*)(void))kernel_statistics, METH_FASTCALL,
     "statistics(addresses, counts, dtypes, out, stride, /)\n--\n\n"
     "Write one row of ten float64 per tensor at out + i * stride."},
    {"fingerprint", (PyCFunction)(void (*)(void))kernel_fingerprint, METH_FASTCALL,
     "fingerprint(addresses, counts, dtypes, firsts, /)\n--\n\n"
     "Return a number of 64 bits for the elements of each tensor, in their order."},
    {"populate", (PyCFunction)(void (*)(void))kernel_populate, METH_FASTCALL,
     "populate(address, nbytes, /)\n--\n\nMake writable pages resident; keep their contents."},
    {"use", kernel_use, METH_O,
     "use(variant, /)\n--\n\nSwitch the instruction set (for tests and benchmarks)."},
    {"variants", kernel_variants, METH_NOARGS,
     "variants()\n--\n\nReturn the instruction sets of this machine, best first."},
    {NULL, NULL, 0, NULL},
};

static int kernel_exec(PyObject *module) {
    (void)module;
    fill_byte_values();
#ifdef HAVE_AVX2_VARIANT
    if (avx2_here()) variant = &AVX2;
#endif
    return 0;
}

static PyModuleDef_Slot SLOTS[] = {
    {Py_mod_exec, (void *)kernel_exec},
    {0, NULL},
};

static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "smdist.kernel._native",
    .m_doc = "Batched copies and fused statistics over addresses.",
    .m_size = 0,
    .m_methods = METHODS,
    .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&MODULE); }
