/* The sweeps of _native.c for one instruction set, with vectors of WIDTH bytes.
 *
 * _native.c includes this file once per instruction set and defines before: VARIANT (the suffix of all
 * functions), VARIANT_TARGET (their target attribute) and WIDTH. The macros are undefined at the end.
 *
 * FN(name) is name_baseline or name_avx2. Vectors never cross a function boundary by value: before AVX
 * that would depend on compiler flags.
 */

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

/* The mean is rounded; the remaining sum of the deviations corrects for that. */
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

/* Counters have the width of the elements, so that the compiler vectorises the loop. */
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

/* A sum of magnitudes that is not finite means NaN, infinities, or an overflow of the sum. */
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

/* Return the sum of all whole words. */
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

/* Return the CRC32C of a frame's payload, some 40 bytes. */
VARIANT_TARGET static uint32_t FN(crc32c)(const unsigned char *data, size_t n) {
    uint32_t crc = UINT32_MAX;
    size_t i = 0;
#ifdef VARIANT_AVX2
    for (; i + 8 <= n; i += 8) crc = (uint32_t)_mm_crc32_u64(crc, word_at((const char *)data + i));
    for (; i < n; i++) crc = _mm_crc32_u8(crc, data[i]);
#else
    /* Four bits at a time: the table fills one cache line. */
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
