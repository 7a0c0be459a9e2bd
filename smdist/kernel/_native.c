/* smdist.kernel._native: what the training thread does on a captured step.
 *
 *   copy        many memcpy in one call, and the guard of what was copied
 *   record      one memcpy, then the journal's frame that says where it went, with the guard
 *   guard       the guard of bytes that are in place
 *   statistics  one row of sufficient statistics per tensor, in one pass over memory
 *   populate    make the pages of a mapping resident before they are needed
 *
 * Addresses come as Python integers, so neither numpy nor torch headers are needed and one
 * limited-API binary serves every Python from 3.10 on.
 *
 * How a tensor is reduced. It is read in chunks that fit the first-level cache. One sweep over a
 * chunk gives sum, sum of squares, sum of magnitudes (double), min, max, least magnitude (native
 * type) and the number of zeros. Two further sweeps exist, over data that is in cache by then, and
 * run only for chunks that need them:
 *   - deviations from the chunk's mean, when sum of squares and sum would cancel,
 *   - counting of NaN and infinities, when the sum of magnitudes is not finite.
 * Chunks are merged by Chan's formula, sums with Neumaier's compensation.
 *
 * The sweeps are compiled once per instruction set: the file includes itself with VARIANT defined.
 * (An always-inline body in functions of several targets does not do: gcc splits wide vectors
 * before it inlines. `target_clones` does not do: it needs ifunc, which musl and macOS lack.)
 */

#ifndef VARIANT

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

/* Below this many bytes the GIL is kept: the work takes some tens of microseconds, while getting
 * the GIL back from a busy Python thread can take a whole switch interval (5 ms). */
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

/* What the first sweep over a chunk finds; min, max and abs_min mean nothing when it has NaN. */
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
 * A short checksum of what was captured. It goes into the journal, and the uploader computes it
 * again over the bytes it stores: if a range was handed out twice, it finds out.
 *
 * Small ranges are covered entirely; of larger ones the first word of each 512 bytes, and the last
 * word. Parts of up to 512 bytes travel in the journal, so one that is put over another, wherever it
 * begins, covers one of these words at least. (While a device copies, small parts are in the arena
 * as well: one of these may fall between two words.)
 *
 * The position of a word is mixed into it, then they are added: in vectors, in numpy, and range by
 * range. */
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

/* `sum` is that of the words before the last one. */
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
#include "_native.c"

#ifdef HAVE_AVX2_VARIANT
#define VARIANT avx2
#define VARIANT_TARGET __attribute__((target("avx2,fma,f16c")))
#define VARIANT_AVX2
#define WIDTH 32
#include "_native.c"
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

static double BYTE_VALUES[DTYPES - I8][256]; /* filled once, when the module is made */

static void fill_byte_values(void) {
    double nan = __builtin_nan("");
    for (unsigned byte = 0; byte < 256; byte++) {
        BYTE_VALUES[I8 - I8][byte] = (int8_t)byte;
        BYTE_VALUES[U8 - I8][byte] = byte;
        BYTE_VALUES[BOOL - I8][byte] = byte != 0;
        BYTE_VALUES[F8_E4M3 - I8][byte] = f8_value(byte, 4, 7, 0x7f, 0);
        BYTE_VALUES[F8_E5M2 - I8][byte] = f8_value(byte, 5, 15, 0x7c, 1);
        /* "FNUZ": finite, and what would be negative zero is the one NaN */
        BYTE_VALUES[F8_E4M3FNUZ - I8][byte] = byte == 0x80 ? nan : f8_value(byte, 4, 8, 0x80, 0);
        BYTE_VALUES[F8_E5M2FNUZ - I8][byte] = byte == 0x80 ? nan : f8_value(byte, 5, 16, 0x80, 0);
        BYTE_VALUES[F8_E8M0 - I8][byte] = byte == 0xff ? nan : power_of_two((int)byte - 127);
    }
}

/* One-byte types have 256 values: a histogram says everything. Four of them, because counting
 * equal neighbours in one would wait for the store before. */
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

/* torch.set_flush_denormal(True) makes subnormal numbers vanish on the training thread; what is in
 * memory is counted as it is. */
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

/* From this size on the copy goes past the caches: nobody on this core reads it again, so it need
 * not push out what training works on, nor does the memory have to be read before it is written.
 * Measured (2.8 GHz EPYC, ranges of 272 KB and 3 MB): 0.65 to 0.7 of memcpy's time. */
#define STREAM_BYTES (64 * 1024)
#define STREAM_BLOCK 4096

/* The guard's words are read where the copy reads: the target is not in a cache. */
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

/* Targets, sources, sizes; the guard of the whole is the sum of those of its ranges. */
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
#define MOST_OPENING 32
#define PAYLOAD_REST 33

/* msgpack: a byte that says what follows, then `bytes` of it, the highest first. */
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

/* Where the next frame of the journal goes, and its ordinal. Moved on here and not by the caller:
 * a signal is met as soon as the call returns, and what is written must not be written over. */
typedef struct {
    uint64_t frame, ordinal;
} Cursor;

/* A reader that looks meanwhile finds no length there, so the head is last. */
static void frame_write(Cursor *cursor, const Record *record) {
    char *frame = (char *)(uintptr_t)cursor->frame;
    unsigned char payload[MOST_OPENING + PAYLOAD_REST], head[FRAME_HEAD], *at = payload;
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
        record.opening_bytes > MOST_OPENING || record.kind > UINT32_MAX ||
        record.arena > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "record(): an address or a number that cannot be");
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

/* 0, or the errno that says these pages cannot be had (touching them would be SIGBUS). */
static int populate_range(uintptr_t from, uintptr_t to, uintptr_t page) {
#ifdef MADV_POPULATE_WRITE
    uintptr_t aligned = from & ~(page - 1);
    size_t size = (size_t)(((to + page - 1) & ~(page - 1)) - aligned);
    for (;;) {
        if (madvise((void *)aligned, size, MADV_POPULATE_WRITE) == 0) return 0;
        if (errno == EINVAL) break; /* kernel before 5.14, or a mapping it does not do */
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
    int trouble = 0;
    if (arguments("populate", nargs, 2) < 0 || as_uint64(args[0], &address) < 0 ||
        as_uint64(args[1], &bytes) < 0 || not_null(address, bytes, 0) < 0)
        return NULL;
    if (bytes) {
        uintptr_t from = (uintptr_t)address, page = (uintptr_t)sysconf(_SC_PAGESIZE);
        Py_BEGIN_ALLOW_THREADS
        trouble = populate_range(from, from + (uintptr_t)bytes, page);
        Py_END_ALLOW_THREADS
    }
    if (trouble) {
        errno = trouble;
        return PyErr_SetFromErrno(PyExc_OSError);
    }
    Py_RETURN_NONE;
}

/* ---- module ------------------------------------------------------------------------------ */

static int avx2_here(void) {
#ifdef HAVE_AVX2_VARIANT
    /* by hand: `__builtin_cpu_supports` needs a runtime symbol that some toolchains do not link */
    unsigned a, b, c, d, saved, unused;
    const unsigned wanted = bit_FMA | bit_F16C | bit_OSXSAVE | bit_AVX;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & wanted) != wanted) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & bit_AVX2)) return 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    return (saved & 6) == 6; /* the operating system keeps the wide registers */
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
     "Copy many ranges of memory that do not overlap; the guard of what was copied."},
    {"guard", (PyCFunction)(void (*)(void))kernel_guard, METH_FASTCALL,
     "guard(addresses, sizes, origin, /)\n--\n\nThe guard of ranges that are in place."},
    {"record", (PyCFunction)(void (*)(void))kernel_record, METH_FASTCALL,
     "record(target, source, size, cursor, opening, when, kind, arena, offset, /)\n--\n\n"
     "Copy, then write the journal's frame that says so, and move the cursor on."},
    {"statistics", (PyCFunction)(void (*)(void))kernel_statistics, METH_FASTCALL,
     "statistics(addresses, counts, dtypes, out, stride, /)\n--\n\n"
     "Write one row of ten float64 per tensor at out + i * stride."},
    {"populate", (PyCFunction)(void (*)(void))kernel_populate, METH_FASTCALL,
     "populate(address, nbytes, /)\n--\n\nMake writable pages resident; contents stay."},
    {"use", kernel_use, METH_O,
     "use(variant, /)\n--\n\nSwitch the instruction set (for tests and benchmarks)."},
    {"variants", kernel_variants, METH_NOARGS,
     "variants()\n--\n\nInstruction sets this machine can use, best first."},
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

#else /* VARIANT: the sweeps for one instruction set, vectors of WIDTH bytes */

/* FN(name) is name_baseline, name_avx2. Vectors never cross a function boundary by value: before
 * AVX that would depend on flags. */

typedef VECTOR(float, WIDTH) FN(Floats);
typedef VECTOR(double, WIDTH) FN(Doubles);
typedef VECTOR(int32_t, WIDTH) FN(Ints);
typedef VECTOR(int64_t, WIDTH) FN(Longs);
typedef VECTOR(uint64_t, WIDTH) FN(Words);
#define Floats FN(Floats)
#define Doubles FN(Doubles)
#define Ints FN(Ints)
#define Longs FN(Longs)
#define Words FN(Words)
#define FLOATS (WIDTH / 4)
#define DOUBLES (WIDTH / 8)

#if defined(VARIANT_AVX2)
#define LESSER_F32(a, b) (Floats)_mm256_min_ps((__m256)(a), (__m256)(b))
#define GREATER_F32(a, b) (Floats)_mm256_max_ps((__m256)(a), (__m256)(b))
#define LESSER_F64(a, b) (Doubles)_mm256_min_pd((__m256d)(a), (__m256d)(b))
#define GREATER_F64(a, b) (Doubles)_mm256_max_pd((__m256d)(a), (__m256d)(b))
#define MULTIPLY_LOW(a, b) (Words)_mm256_mul_epu32((__m256i)(a), (__m256i)(b))
#define WIDEN(at) (Doubles)_mm256_cvtps_pd(_mm_loadu_ps((const float *)(const void *)(at)))
#define WIDEN_HALVES(at) \
    (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(at)))
#elif defined(__x86_64__)
#define LESSER_F32(a, b) (Floats)_mm_min_ps((__m128)(a), (__m128)(b))
#define GREATER_F32(a, b) (Floats)_mm_max_ps((__m128)(a), (__m128)(b))
#define LESSER_F64(a, b) (Doubles)_mm_min_pd((__m128d)(a), (__m128d)(b))
#define GREATER_F64(a, b) (Doubles)_mm_max_pd((__m128d)(a), (__m128d)(b))
#define MULTIPLY_LOW(a, b) (Words)_mm_mul_epu32((__m128i)(a), (__m128i)(b))
#define WIDEN(at) \
    (Doubles)_mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(const void *)(at))))
#elif defined(__aarch64__)
#define LESSER_F32(a, b) (Floats)vminq_f32((float32x4_t)(a), (float32x4_t)(b))
#define GREATER_F32(a, b) (Floats)vmaxq_f32((float32x4_t)(a), (float32x4_t)(b))
#define LESSER_F64(a, b) (Doubles)vminq_f64((float64x2_t)(a), (float64x2_t)(b))
#define GREATER_F64(a, b) (Doubles)vmaxq_f64((float64x2_t)(a), (float64x2_t)(b))
#define WIDEN(at) (Doubles)vcvt_f64_f32(vreinterpret_f32_u8(vld1_u8((const uint8_t *)(at))))
#define WIDEN_HALVES(at) (Floats)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t *)(at))))
#else
#define CHOSEN(bits, test, a, b) (((bits)(a) & (test)) | ((bits)(b) & ~(test)))
#define LESSER_F32(a, b) (Floats)CHOSEN(Ints, (a) < (b), a, b)
#define GREATER_F32(a, b) (Floats)CHOSEN(Ints, (a) > (b), a, b)
#define LESSER_F64(a, b) (Doubles)CHOSEN(Longs, (a) < (b), a, b)
#define GREATER_F64(a, b) (Doubles)CHOSEN(Longs, (a) > (b), a, b)
#define WIDEN(at) FN(widen)(at)
static inline Doubles FN(widen)(const char *at) {
    float x[2];
    memcpy(x, at, sizeof x);
    return (Doubles){x[0], x[1]};
}
#endif

#ifndef MULTIPLY_LOW
#define MULTIPLY_LOW(a, b) (((a) & UINT32_MAX) * ((b) & UINT32_MAX))
#endif

#define TOTAL(total, lanes_of)                        \
    do {                                              \
        double lanes[DOUBLES];                        \
        memcpy(lanes, &(lanes_of), sizeof lanes);     \
        for (int l = 0; l < DOUBLES; l++) total += lanes[l]; \
    } while (0)

VARIANT_TARGET static void FN(sweep_f32)(const char *data, size_t n, Sweep *found) {
    Doubles sum_a = {0}, sum_b = {0}, squares_a = {0}, squares_b = {0}, abs_a = {0}, abs_b = {0};
    Floats least = (Floats){0} + __builtin_inff(), most = -least, abs_least = least;
    Ints zero_lanes = {0};
    size_t i = 0;
    for (; i + FLOATS <= n; i += FLOATS) {
        Floats x;
        memcpy(&x, data + 4 * i, sizeof x);
        Doubles a = WIDEN(data + 4 * i), b = WIDEN(data + 4 * i + WIDTH / 2);
        Floats magnitude = (Floats)((Ints)x & F32_MAGNITUDE);
        least = LESSER_F32(x, least);
        most = GREATER_F32(x, most);
        abs_least = LESSER_F32(magnitude, abs_least);
        zero_lanes -= (Ints)magnitude == 0;
        sum_a += a;
        sum_b += b;
        squares_a += a * a;
        squares_b += b * b;
        abs_a += (Doubles)((Longs)a & F64_MAGNITUDE);
        abs_b += (Doubles)((Longs)b & F64_MAGNITUDE);
    }
    sum_a += sum_b;
    squares_a += squares_b;
    abs_a += abs_b;
    double sum = 0, squares = 0, abs_sum = 0;
    TOTAL(sum, sum_a);
    TOTAL(squares, squares_a);
    TOTAL(abs_sum, abs_a);
    float min = least[0], max = most[0], abs_min = abs_least[0];
    uint64_t zeros = (uint64_t)zero_lanes[0];
    for (int lane = 1; lane < FLOATS; lane++) {
        min = least[lane] < min ? least[lane] : min;
        max = most[lane] > max ? most[lane] : max;
        abs_min = abs_least[lane] < abs_min ? abs_least[lane] : abs_min;
        zeros += (uint64_t)zero_lanes[lane];
    }
    for (; i < n; i++) {
        float x;
        memcpy(&x, data + 4 * i, sizeof x);
        float magnitude = __builtin_fabsf(x);
        min = x < min ? x : min;
        max = x > max ? x : max;
        abs_min = magnitude < abs_min ? magnitude : abs_min;
        zeros += x == 0;
        sum += x;
        squares += (double)x * x;
        abs_sum += magnitude;
    }
    *found = (Sweep){sum, squares, abs_sum, min, max, abs_min, zeros};
}

VARIANT_TARGET static void FN(sweep_f64)(const char *data, size_t n, Sweep *found) {
    Doubles sum_a = {0}, sum_b = {0}, squares_a = {0}, squares_b = {0}, abs_a = {0}, abs_b = {0};
    Doubles least = (Doubles){0} + __builtin_inf(), most = -least, abs_least = least;
    Longs zero_lanes = {0};
    size_t i = 0;
    for (; i + 2 * DOUBLES <= n; i += 2 * DOUBLES) {
        Doubles a, b;
        memcpy(&a, data + 8 * i, sizeof a);
        memcpy(&b, data + 8 * i + WIDTH, sizeof b);
        Doubles abs_of_a = (Doubles)((Longs)a & F64_MAGNITUDE);
        Doubles abs_of_b = (Doubles)((Longs)b & F64_MAGNITUDE);
        least = LESSER_F64(LESSER_F64(a, b), least);
        most = GREATER_F64(GREATER_F64(a, b), most);
        abs_least = LESSER_F64(LESSER_F64(abs_of_a, abs_of_b), abs_least);
        zero_lanes -= (a == 0.0) + (b == 0.0);
        sum_a += a;
        sum_b += b;
        squares_a += a * a;
        squares_b += b * b;
        abs_a += abs_of_a;
        abs_b += abs_of_b;
    }
    sum_a += sum_b;
    squares_a += squares_b;
    abs_a += abs_b;
    double sum = 0, squares = 0, abs_sum = 0;
    TOTAL(sum, sum_a);
    TOTAL(squares, squares_a);
    TOTAL(abs_sum, abs_a);
    double min = least[0], max = most[0], abs_min = abs_least[0];
    uint64_t zeros = (uint64_t)zero_lanes[0];
    for (int lane = 1; lane < DOUBLES; lane++) {
        min = least[lane] < min ? least[lane] : min;
        max = most[lane] > max ? most[lane] : max;
        abs_min = abs_least[lane] < abs_min ? abs_least[lane] : abs_min;
        zeros += (uint64_t)zero_lanes[lane];
    }
    for (; i < n; i++) {
        double x;
        memcpy(&x, data + 8 * i, sizeof x);
        double magnitude = __builtin_fabs(x);
        min = x < min ? x : min;
        max = x > max ? x : max;
        abs_min = magnitude < abs_min ? magnitude : abs_min;
        zeros += x == 0;
        sum += x;
        squares += x * x;
        abs_sum += magnitude;
    }
    *found = (Sweep){sum, squares, abs_sum, min, max, abs_min, zeros};
}

/* The mean is rounded: what is left of the sum of the deviations corrects for it. */
static Deviations FN(corrected)(double squares, double rest, size_t n) {
    double m2 = squares - rest * rest / (double)n;
    return (Deviations){m2 < 0.0 ? 0.0 : m2, rest};
}

VARIANT_TARGET static Deviations FN(deviations_f32)(const char *data, size_t n, double mean) {
    Doubles rest_a = {0}, rest_b = {0}, squares_a = {0}, squares_b = {0};
    size_t i = 0;
    for (; i + FLOATS <= n; i += FLOATS) {
        Doubles a = WIDEN(data + 4 * i) - mean, b = WIDEN(data + 4 * i + WIDTH / 2) - mean;
        rest_a += a;
        rest_b += b;
        squares_a += a * a;
        squares_b += b * b;
    }
    double rest = 0, squares = 0;
    rest_a += rest_b;
    squares_a += squares_b;
    TOTAL(rest, rest_a);
    TOTAL(squares, squares_a);
    for (; i < n; i++) {
        float x;
        memcpy(&x, data + 4 * i, sizeof x);
        double deviation = x - mean;
        rest += deviation;
        squares += deviation * deviation;
    }
    return FN(corrected)(squares, rest, n);
}

VARIANT_TARGET static Deviations FN(deviations_f64)(const char *data, size_t n, double mean) {
    Doubles rest_a = {0}, rest_b = {0}, squares_a = {0}, squares_b = {0};
    size_t i = 0;
    for (; i + 2 * DOUBLES <= n; i += 2 * DOUBLES) {
        Doubles a, b;
        memcpy(&a, data + 8 * i, sizeof a);
        memcpy(&b, data + 8 * i + WIDTH, sizeof b);
        a -= mean;
        b -= mean;
        rest_a += a;
        rest_b += b;
        squares_a += a * a;
        squares_b += b * b;
    }
    double rest = 0, squares = 0;
    rest_a += rest_b;
    squares_a += squares_b;
    TOTAL(rest, rest_a);
    TOTAL(squares, squares_a);
    for (; i < n; i++) {
        double x;
        memcpy(&x, data + 8 * i, sizeof x);
        double deviation = x - mean;
        rest += deviation;
        squares += deviation * deviation;
    }
    return FN(corrected)(squares, rest, n);
}

/* Counters of the element's own width, so that the loop vectorises as it is. */
#define DEFINE_COUNTS(name, type, magnitude_mask, infinity)                           \
    VARIANT_TARGET static int FN(nonfinite_##name)(const char *data, size_t n, Row *row) { \
        type nans = 0, infs = 0;                                                      \
        for (size_t i = 0; i < n; i++) {                                              \
            type bits;                                                                \
            memcpy(&bits, data + sizeof bits * i, sizeof bits);                       \
            bits &= (magnitude_mask);                                                 \
            nans += bits > (infinity);                                                \
            infs += bits == (infinity);                                               \
        }                                                                             \
        row->nans += (uint64_t)nans;                                                  \
        row->infs += (uint64_t)infs;                                                  \
        return nans || infs;                                                          \
    }

DEFINE_COUNTS(f32, int32_t, F32_MAGNITUDE, F32_INFINITY)
DEFINE_COUNTS(f64, int64_t, F64_MAGNITUDE, F64_INFINITY)

/* A sum of magnitudes that is not finite means NaN, infinities, or a sum that ran over. */
#define DEFINE_REDUCE(name)                                                           \
    static void FN(reduce_##name)(const char *data, size_t n, Row *row) {             \
        Sweep found;                                                                  \
        FN(sweep_##name)(data, n, &found);                                            \
        double m2 = found.squares - found.sum * found.sum / (double)n;                \
        Deviations deviations = {m2, 0.0};                                            \
        int nonfinite = !is_finite(found.abs_sum) && FN(nonfinite_##name)(data, n, row); \
        if (!nonfinite && !(m2 >= found.squares * CANCELLATION && is_finite(m2)))     \
            deviations = FN(deviations_##name)(data, n, found.sum / (double)n);       \
        row_merge(row, &found, n, deviations);                                        \
    }

DEFINE_REDUCE(f32)
DEFINE_REDUCE(f64)

#define DEFINE_REDUCE_AS(name, type, wide, capacity, wide_type)                       \
    VARIANT_TARGET static void FN(reduce_##name)(const char *data, size_t n, Row *row) { \
        wide_type buffer[capacity];                                                   \
        for (size_t i = 0; i < n; i++) {                                              \
            type x;                                                                   \
            memcpy(&x, data + sizeof x * i, sizeof x);                                \
            buffer[i] = (wide_type)x;                                                 \
        }                                                                             \
        FN(reduce_##wide)((const char *)buffer, n, row);                              \
    }

DEFINE_REDUCE_AS(i16, int16_t, f32, CHUNK_F32, float)
DEFINE_REDUCE_AS(u16, uint16_t, f32, CHUNK_F32, float)
DEFINE_REDUCE_AS(i32, int32_t, f64, CHUNK_F64, double)
DEFINE_REDUCE_AS(u32, uint32_t, f64, CHUNK_F64, double)
DEFINE_REDUCE_AS(i64, int64_t, f64, CHUNK_F64, double)
DEFINE_REDUCE_AS(u64, uint64_t, f64, CHUNK_F64, double)

VARIANT_TARGET static void FN(reduce_bf16)(const char *data, size_t n, Row *row) {
    uint32_t buffer[CHUNK_F32];
    for (size_t i = 0; i < n; i++) {
        uint16_t x;
        memcpy(&x, data + 2 * i, sizeof x);
        buffer[i] = (uint32_t)x << 16;
    }
    FN(reduce_f32)((const char *)buffer, n, row);
}

VARIANT_TARGET static void FN(reduce_f16)(const char *data, size_t n, Row *row) {
    float buffer[CHUNK_F32];
    size_t i = 0;
#ifdef WIDEN_HALVES
    for (; i + FLOATS <= n; i += FLOATS) {
        Floats x = WIDEN_HALVES(data + 2 * i);
        memcpy(buffer + i, &x, sizeof x);
    }
#endif
    for (; i < n; i++) {
        uint16_t x;
        memcpy(&x, data + 2 * i, sizeof x);
        buffer[i] = f16_value(x);
    }
    FN(reduce_f32)((const char *)buffer, n, row);
}

/* The sum of all whole words. */
VARIANT_TARGET static uint64_t FN(guard_words)(const char *data, size_t size, uint64_t position) {
    Words sum_a = {0}, sum_b = {0}, key_a, key_b, step = sum_a + 2 * WIDTH * GUARD_KEY;
    uint64_t lanes[WIDTH / 8], sum = 0;
    size_t i = 0;
    memcpy(&key_a, GUARD_LANES, sizeof key_a);
    key_a += (position + 1) * GUARD_KEY;
    key_b = key_a + WIDTH * GUARD_KEY;
    for (; i + 2 * WIDTH <= size; i += 2 * WIDTH) {
        Words a, b;
        memcpy(&a, data + i, sizeof a);
        memcpy(&b, data + i + WIDTH, sizeof b);
        Words mixed_a = a ^ key_a, mixed_b = b ^ key_b;
        sum_a += a + MULTIPLY_LOW(mixed_a, mixed_a >> 32);
        sum_b += b + MULTIPLY_LOW(mixed_b, mixed_b >> 32);
        key_a += step;
        key_b += step;
    }
    sum_a += sum_b;
    memcpy(lanes, &sum_a, sizeof lanes);
    for (size_t l = 0; l < WIDTH / 8; l++) sum += lanes[l];
    for (; i + 8 <= size; i += 8) sum += guard_word(word_at(data + i), position + i);
    return sum;
}

/* Of a frame's payload, some 40 bytes. */
VARIANT_TARGET static uint32_t FN(crc32c)(const unsigned char *data, size_t n) {
    uint32_t crc = UINT32_MAX;
    size_t i = 0;
#ifdef VARIANT_AVX2
    for (; i + 8 <= n; i += 8) crc = (uint32_t)_mm_crc32_u64(crc, word_at((const char *)data + i));
    for (; i < n; i++) crc = _mm_crc32_u8(crc, data[i]);
#else
    /* Four bits at a time: the table is one line of the cache. */
    static const uint32_t table[16] = {
        0x00000000, 0x105ec76f, 0x20bd8ede, 0x30e349b1, 0x417b1dbc, 0x5125dad3, 0x61c69362,
        0x7198540d, 0x82f63b78, 0x92a8fc17, 0xa24bb5a6, 0xb21572c9, 0xc38d26c4, 0xd3d3e1ab,
        0xe330a81a, 0xf36e6f75,
    };
    for (; i < n; i++) {
        crc ^= data[i];
        crc = crc >> 4 ^ table[crc & 15];
        crc = crc >> 4 ^ table[crc & 15];
    }
#endif
    return ~crc;
}

#undef VARIANT
#undef VARIANT_TARGET
#undef WIDTH
#undef Floats
#undef Doubles
#undef Ints
#undef Longs
#undef Words
#undef FLOATS
#undef DOUBLES
#undef LESSER_F32
#undef GREATER_F32
#undef LESSER_F64
#undef GREATER_F64
#undef MULTIPLY_LOW
#undef WIDEN
#undef WIDEN_HALVES
#undef TOTAL
#undef DEFINE_COUNTS
#undef DEFINE_REDUCE
#undef DEFINE_REDUCE_AS

#endif
