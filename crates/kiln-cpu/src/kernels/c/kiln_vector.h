/* Vectors of a fixed width, on the vector extensions that GCC and clang share.
 *
 * KILN_LANES is the number of f32 lanes (4, 8 or 16) and KILN_FMA says whether a fused multiply-add is one
 * instruction; the generator defines both before it includes this file. Arithmetic and comparisons on these types are
 * the language's own operators; what follows is only what the operators cannot say.
 */
#ifndef KILN_VECTOR_H
#define KILN_VECTOR_H

#include <stddef.h>
#include <stdint.h>

typedef float vf __attribute__((vector_size(4 * KILN_LANES)));       /* KILN_LANES floats */
typedef int32_t vi __attribute__((vector_size(4 * KILN_LANES)));     /* as many integers, or lane masks (0 or -1) */
typedef uint32_t vu __attribute__((vector_size(4 * KILN_LANES)));
typedef double vd __attribute__((vector_size(4 * KILN_LANES)));      /* half as many doubles */
typedef int64_t vl __attribute__((vector_size(4 * KILN_LANES)));     /* and masks for them */
typedef float vf_half __attribute__((vector_size(2 * KILN_LANES)));  /* the floats that convert to one vd */
typedef int32_t vi_half __attribute__((vector_size(2 * KILN_LANES)));

#define KILN_INLINE static inline __attribute__((always_inline, unused))

/* Whether clang has a builtin: those on whole vectors came one by one, most of them with clang 17. */
#if defined(__clang__)
#define KILN_CLANG_HAS(builtin) __has_builtin(builtin)
#else
#define KILN_CLANG_HAS(builtin) 0
#endif

/* Before a loop over lanes or kernel elements: unrolled, so that arrays of vectors stay in registers. */
#if defined(__clang__)
#define KILN_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KILN_UNROLL _Pragma("GCC unroll 16")
#endif

/* A vector literal with lane l = F(l). */
#if KILN_LANES == 16
#define KILN_EACH(F) {F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7), F(8), F(9), F(10), F(11), F(12), F(13), F(14), F(15)}
#define KILN_EACH_HALF(F) {F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7)}
#elif KILN_LANES == 8
#define KILN_EACH(F) {F(0), F(1), F(2), F(3), F(4), F(5), F(6), F(7)}
#define KILN_EACH_HALF(F) {F(0), F(1), F(2), F(3)}
#else
#define KILN_EACH(F) {F(0), F(1), F(2), F(3)}
#define KILN_EACH_HALF(F) {F(0), F(1)}
#endif

/* Lanes of a and b in any order: index l < KILN_LANES is a[l], the rest b[l - KILN_LANES]. */
#if defined(__clang__)
#define KILN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define KILN_SHUFFLE_D(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KILN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#define KILN_SHUFFLE_D(a, b, ...) __builtin_shuffle(a, b, (vl){__VA_ARGS__})
#endif

#define KILN_SAME(l) x
KILN_INLINE vf vf_set1(float x) { return (vf)KILN_EACH(KILN_SAME); }
KILN_INLINE vi vi_set1(int32_t x) { return (vi)KILN_EACH(KILN_SAME); }
KILN_INLINE vd vd_set1(double x) { return (vd)KILN_EACH_HALF(KILN_SAME); }
KILN_INLINE vl vl_set1(int64_t x) { return (vl)KILN_EACH_HALF(KILN_SAME); }
#undef KILN_SAME

#define KILN_INDEX(l) (l)
/* 0, 1, 2, ... */
KILN_INLINE vi vi_iota(void) { return (vi)KILN_EACH(KILN_INDEX); }
KILN_INLINE vl vl_iota(void) { return (vl)KILN_EACH_HALF(KILN_INDEX); }
#undef KILN_INDEX

/* Loads and stores need no alignment. */
KILN_INLINE vf vf_load(const float *p) { vf v; __builtin_memcpy(&v, p, sizeof v); return v; }
KILN_INLINE vi vi_load(const int32_t *p) { vi v; __builtin_memcpy(&v, p, sizeof v); return v; }
KILN_INLINE vl vl_load(const int64_t *p) { vl v; __builtin_memcpy(&v, p, sizeof v); return v; }
KILN_INLINE vd vd_load(const double *p) { vd v; __builtin_memcpy(&v, p, sizeof v); return v; }
KILN_INLINE void vf_store(float *p, vf v) { __builtin_memcpy(p, &v, sizeof v); }
KILN_INLINE void vi_store(int32_t *p, vi v) { __builtin_memcpy(p, &v, sizeof v); }
KILN_INLINE void vl_store(int64_t *p, vl v) { __builtin_memcpy(p, &v, sizeof v); }
KILN_INLINE void vd_store(double *p, vd v) { __builtin_memcpy(p, &v, sizeof v); }

/* The first n lanes (0 <= n <= KILN_LANES); the others load as 0 and are not stored. */
#if KILN_LANES == 16 && defined(__AVX512F__) && !defined(__clang__)
KILN_INLINE vf vf_load_n(const float *p, int64_t n) {
    return __builtin_ia32_loadups512_mask(p, (vf){0}, (uint16_t)((1u << n) - 1));
}
KILN_INLINE void vf_store_n(float *p, vf v, int64_t n) {
    __builtin_ia32_storeups512_mask(p, v, (uint16_t)((1u << n) - 1));
}
#else
KILN_INLINE vf vf_load_n(const float *p, int64_t n) {
    vf v = {0};
    for (int64_t l = 0; l < n; l++) v[l] = p[l];
    return v;
}
KILN_INLINE void vf_store_n(float *p, vf v, int64_t n) {
    for (int64_t l = 0; l < n; l++) p[l] = v[l];
}
#endif

/* The first n lanes of doubles. */
KILN_INLINE vd vd_load_n(const double *p, int64_t n) { vd v = {0}; __builtin_memcpy(&v, p, (size_t)n * sizeof *p); return v; }
KILN_INLINE void vd_store_n(double *p, vd v, int64_t n) { __builtin_memcpy(p, &v, (size_t)n * sizeof *p); }

/* Integers, to lanes of 64 bits. */
KILN_INLINE vl vl_load_i64(const int64_t *p) { vl v; __builtin_memcpy(&v, p, sizeof v); return v; }
KILN_INLINE vl vl_load_i32(const int32_t *p) {
    vi_half v;
    __builtin_memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vl);
}

/* Integers of 16 bits, to lanes of 64 and of 32. */
KILN_INLINE vl vl_load_u16(const uint16_t *p) {
    typedef uint16_t vs __attribute__((vector_size(KILN_LANES)));
    vs v;
    __builtin_memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vl);
}
KILN_INLINE vi vi_load_u16(const uint16_t *p) {
    typedef uint16_t vs __attribute__((vector_size(2 * KILN_LANES)));
    vs v;
    __builtin_memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vi);
}

/* Integers of 64 bits, to and from lanes of 32. */
KILN_INLINE vi vi_load_i64(const int64_t *p) {
    typedef int64_t vq __attribute__((vector_size(8 * KILN_LANES)));
    vq v;
    __builtin_memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v, vi);
}
KILN_INLINE void vi_store_i64(int64_t *p, vi v) {
    KILN_UNROLL for (int l = 0; l < KILN_LANES; l++) p[l] = v[l];
}

/* A lane mask from bytes, set where they are not zero. */
KILN_INLINE vi vi_mask_u8(const uint8_t *p) {
    typedef int8_t vb __attribute__((vector_size(KILN_LANES)));
    vb v;
    __builtin_memcpy(&v, p, sizeof v);
    return __builtin_convertvector(v != 0, vi);
}
KILN_INLINE vl vl_mask_u8(const uint8_t *p) {
    vl v;
    KILN_UNROLL for (int l = 0; l < KILN_LANES / 2; l++) v[l] = p[l];
    return v != 0;
}

/* p[0], p[stride], p[2 * stride], ... */
KILN_INLINE vf vf_load_stride(const float *p, int64_t stride) {
#define KILN_AT(l) p[(l) * stride]
    return (vf)KILN_EACH(KILN_AT);
#undef KILN_AT
}
KILN_INLINE vd vd_load_stride(const double *p, int64_t stride) {
#define KILN_AT(l) p[(l) * stride]
    return (vd)KILN_EACH_HALF(KILN_AT);
#undef KILN_AT
}
KILN_INLINE void vf_store_stride(float *p, int64_t stride, vf v) {
    KILN_UNROLL for (int l = 0; l < KILN_LANES; l++) p[l * stride] = v[l];
}
KILN_INLINE void vd_store_stride(double *p, int64_t stride, vd v) {
    KILN_UNROLL for (int l = 0; l < KILN_LANES / 2; l++) p[l * stride] = v[l];
}

/* a * b + c, rounded once where the machine can; otherwise twice (a library call would cost a hundred times more). */
#if KILN_FMA
KILN_INLINE float sf_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
KILN_INLINE double sd_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
#else
KILN_INLINE float sf_fma(float a, float b, float c) { return a * b + c; }
KILN_INLINE double sd_fma(double a, double b, double c) { return a * b + c; }
#endif

#if !KILN_FMA
KILN_INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
KILN_INLINE vd vd_fma(vd a, vd b, vd c) { return a * b + c; }
#elif KILN_CLANG_HAS(__builtin_elementwise_fma)
KILN_INLINE vf vf_fma(vf a, vf b, vf c) { return __builtin_elementwise_fma(a, b, c); }
KILN_INLINE vd vd_fma(vd a, vd b, vd c) { return __builtin_elementwise_fma(a, b, c); }
#elif defined(__clang__) && defined(__aarch64__)
KILN_INLINE vf vf_fma(vf a, vf b, vf c) {
    KILN_UNROLL for (int l = 0; l < KILN_LANES; l++) c[l] = __builtin_fmaf(a[l], b[l], c[l]);
    return c;
}
KILN_INLINE vd vd_fma(vd a, vd b, vd c) {
    KILN_UNROLL for (int l = 0; l < KILN_LANES / 2; l++) c[l] = __builtin_fma(a[l], b[l], c[l]);
    return c;
}
#elif KILN_LANES == 16
/* 4 is the current rounding mode, the mask selects all lanes. */
KILN_INLINE vf vf_fma(vf a, vf b, vf c) { return __builtin_ia32_vfmaddps512_mask(a, b, c, (uint16_t)-1, 4); }
KILN_INLINE vd vd_fma(vd a, vd b, vd c) { return __builtin_ia32_vfmaddpd512_mask(a, b, c, (uint8_t)-1, 4); }
#elif KILN_LANES == 8
KILN_INLINE vf vf_fma(vf a, vf b, vf c) { return __builtin_ia32_vfmaddps256(a, b, c); }
KILN_INLINE vd vd_fma(vd a, vd b, vd c) { return __builtin_ia32_vfmaddpd256(a, b, c); }
#elif defined(__aarch64__)
KILN_INLINE vf vf_fma(vf a, vf b, vf c) { return __builtin_aarch64_fmav4sf(a, b, c); }
KILN_INLINE vd vd_fma(vd a, vd b, vd c) { return __builtin_aarch64_fmav2df(a, b, c); }
#else
KILN_INLINE vf vf_fma(vf a, vf b, vf c) { return __builtin_ia32_vfmaddps(a, b, c); }
KILN_INLINE vd vd_fma(vd a, vd b, vd c) { return __builtin_ia32_vfmaddpd(a, b, c); }
#endif

/* Correctly rounded square root. */
KILN_INLINE vf vf_sqrt(vf x) {
#if KILN_CLANG_HAS(__builtin_elementwise_sqrt)
    return __builtin_elementwise_sqrt(x);
#elif defined(__clang__)
    KILN_UNROLL for (int l = 0; l < KILN_LANES; l++) x[l] = __builtin_sqrtf(x[l]);
    return x;
#elif KILN_LANES == 16 && defined(__AVX512F__)
    return __builtin_ia32_sqrtps512_mask(x, x, (uint16_t)-1, 4);
#elif KILN_LANES == 8 && defined(__AVX__)
    return __builtin_ia32_sqrtps256(x);
#elif KILN_LANES == 4 && defined(__SSE2__)
    return __builtin_ia32_sqrtps(x);
#else
    for (int l = 0; l < KILN_LANES; l++) x[l] = __builtin_sqrtf(x[l]);
    return x;
#endif
}
KILN_INLINE vd vd_sqrt(vd x) {
    for (int l = 0; l < KILN_LANES / 2; l++) x[l] = __builtin_sqrt(x[l]);
    return x;
}

/* mask ? a : b in each lane; the mask is what a comparison gives. */
KILN_INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
KILN_INLINE vi vi_select(vi mask, vi a, vi b) { return (mask & a) | (~mask & b); }
KILN_INLINE vl vl_select(vl mask, vl a, vl b) { return (mask & a) | (~mask & b); }
KILN_INLINE vd vd_select(vl mask, vd a, vd b) { return (vd)((mask & (vl)a) | (~mask & (vl)b)); }

KILN_INLINE vf vf_abs(vf x) { return (vf)((vi)x & 0x7fffffff); }
KILN_INLINE vd vd_abs(vd x) { return (vd)((vl)x & 0x7fffffffffffffffLL); }
/* The magnitude of x with the sign of s.
 *
 * Up to clang 19, a lane mask that chooses between this and s (before clang 18: between this and x) becomes one masked vpternlog
 * whose operands are in the wrong order. The empty instruction keeps choice and copysign apart. Nothing else here is a copysign
 * in clang's eyes, and the same logic on integers it folds rightly. */
KILN_INLINE vf vf_copysign(vf x, vf s) {
    vf y = (vf)(((vi)x & 0x7fffffff) | ((vi)s & (int32_t)0x80000000));
#if defined(__clang__) && defined(__AVX512F__)
    __asm__("" : "+v"(y));
#endif
    return y;
}

/* The larger and the smaller; NaN if either is. */
KILN_INLINE vf vf_max(vf a, vf b) { return vf_select((a > b) | (a != a), a, b); }
KILN_INLINE vf vf_min(vf a, vf b) { return vf_select((a < b) | (a != a), a, b); }
/* a > b ? a : b, one instruction: b where either is NaN. */
KILN_INLINE vf vf_larger(vf a, vf b) {
#if KILN_LANES == 16 && defined(__AVX512F__) && !defined(__clang__)
    return __builtin_ia32_maxps512_mask(a, b, b, (uint16_t)-1, 4);
#else
    return vf_select(a > b, a, b);
#endif
}
KILN_INLINE vd vd_larger(vd a, vd b) { return vd_select(a > b, a, b); }
KILN_INLINE vd vd_max(vd a, vd b) { return vd_select((a > b) | (a != a), a, b); }
KILN_INLINE vd vd_min(vd a, vd b) { return vd_select((a < b) | (a != a), a, b); }
KILN_INLINE float sf_max(float a, float b) { return (a > b) | (a != a) ? a : b; }
KILN_INLINE float sf_min(float a, float b) { return (a < b) | (a != a) ? a : b; }

/* Lanes to one value, always in this order: halves onto each other until one lane is left. */
typedef float vf4 __attribute__((vector_size(16)));
typedef float vf8 __attribute__((vector_size(32)));
#if KILN_LANES == 16
#define KILN_FOLD(NAME, OP) \
    KILN_INLINE float NAME(vf v) { \
        vf8 h[2]; __builtin_memcpy(h, &v, sizeof v); \
        vf8 w = {OP(h[0][0], h[1][0]), OP(h[0][1], h[1][1]), OP(h[0][2], h[1][2]), OP(h[0][3], h[1][3]), \
                 OP(h[0][4], h[1][4]), OP(h[0][5], h[1][5]), OP(h[0][6], h[1][6]), OP(h[0][7], h[1][7])}; \
        return OP(OP(OP(w[0], w[4]), OP(w[2], w[6])), OP(OP(w[1], w[5]), OP(w[3], w[7]))); \
    }
KILN_INLINE float vf_sum(vf v) {
    vf8 h[2];
    vf4 q[2];
    __builtin_memcpy(h, &v, sizeof v);
    h[0] += h[1];
    __builtin_memcpy(q, &h[0], sizeof h[0]);
    q[0] += q[1];
    return (q[0][0] + q[0][2]) + (q[0][1] + q[0][3]);
}
#elif KILN_LANES == 8
#define KILN_FOLD(NAME, OP) \
    KILN_INLINE float NAME(vf w) { \
        return OP(OP(OP(w[0], w[4]), OP(w[2], w[6])), OP(OP(w[1], w[5]), OP(w[3], w[7]))); \
    }
KILN_INLINE float vf_sum(vf v) {
    vf4 q[2];
    __builtin_memcpy(q, &v, sizeof v);
    q[0] += q[1];
    return (q[0][0] + q[0][2]) + (q[0][1] + q[0][3]);
}
#else
#define KILN_FOLD(NAME, OP) \
    KILN_INLINE float NAME(vf w) { return OP(OP(w[0], w[2]), OP(w[1], w[3])); }
KILN_INLINE float vf_sum(vf v) { return (v[0] + v[2]) + (v[1] + v[3]); }
#endif
KILN_FOLD(vf_max_all, sf_max)
KILN_FOLD(vf_min_all, sf_min)
#undef KILN_FOLD
KILN_INLINE double vd_sum(vd v) {
#if KILN_LANES == 16
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
#elif KILN_LANES == 8
    return (v[0] + v[2]) + (v[1] + v[3]);
#else
    return v[0] + v[1];
#endif
}
/* The largest lane, none of them NaN. */
KILN_INLINE float vf_largest(vf v) {
    float best[KILN_LANES];
    vf_store(best, v);
    for (int half = KILN_LANES / 2; half > 0; half /= 2)
        KILN_UNROLL for (int l = 0; l < half; l++) best[l] = best[l] > best[l + half] ? best[l] : best[l + half];
    return best[0];
}
KILN_INLINE double vd_largest(vd v) {
    double best = v[0];
    KILN_UNROLL for (int l = 1; l < KILN_LANES / 2; l++) best = best > v[l] ? best : v[l];
    return best;
}
/* Whether any lane of a mask is set. */
KILN_INLINE int vi_any(vi mask) {
    int32_t any = 0;
    for (int l = 0; l < KILN_LANES; l++) any |= mask[l];
    return any != 0;
}

/* Turns KILN_LANES rows into KILN_LANES columns: each round interleaves the lower half of the rows with the upper. */
#if KILN_LANES == 16
#define KILN_LOW(a, b) KILN_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define KILN_HIGH(a, b) KILN_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif KILN_LANES == 8
#define KILN_LOW(a, b) KILN_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define KILN_HIGH(a, b) KILN_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define KILN_LOW(a, b) KILN_SHUFFLE(a, b, 0, 4, 1, 5)
#define KILN_HIGH(a, b) KILN_SHUFFLE(a, b, 2, 6, 3, 7)
#endif
#define KILN_PAIR(to, from, i) \
    to[2 * (i)] = KILN_LOW(from[i], from[(i) + KILN_LANES / 2]); \
    to[2 * (i) + 1] = KILN_HIGH(from[i], from[(i) + KILN_LANES / 2]);
#if KILN_LANES == 16
#define KILN_ROUND(to, from) \
    KILN_PAIR(to, from, 0) KILN_PAIR(to, from, 1) KILN_PAIR(to, from, 2) KILN_PAIR(to, from, 3) \
    KILN_PAIR(to, from, 4) KILN_PAIR(to, from, 5) KILN_PAIR(to, from, 6) KILN_PAIR(to, from, 7)
#elif KILN_LANES == 8
#define KILN_ROUND(to, from) KILN_PAIR(to, from, 0) KILN_PAIR(to, from, 1) KILN_PAIR(to, from, 2) KILN_PAIR(to, from, 3)
#else
#define KILN_ROUND(to, from) KILN_PAIR(to, from, 0) KILN_PAIR(to, from, 1)
#endif
KILN_INLINE void vf_transpose(vf row[KILN_LANES]) {
    vf other[KILN_LANES];
    KILN_ROUND(other, row)
    KILN_ROUND(row, other)
#if KILN_LANES == 16
    KILN_ROUND(other, row)
    KILN_ROUND(row, other)
#elif KILN_LANES == 8
    KILN_ROUND(other, row)
    __builtin_memcpy(row, other, sizeof other);
#endif
}

/* The same for doubles, half as many of them. */
#if KILN_LANES == 16
#define KILN_LOW_D(a, b) KILN_SHUFFLE_D(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define KILN_HIGH_D(a, b) KILN_SHUFFLE_D(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#elif KILN_LANES == 8
#define KILN_LOW_D(a, b) KILN_SHUFFLE_D(a, b, 0, 4, 1, 5)
#define KILN_HIGH_D(a, b) KILN_SHUFFLE_D(a, b, 2, 6, 3, 7)
#else
#define KILN_LOW_D(a, b) KILN_SHUFFLE_D(a, b, 0, 2)
#define KILN_HIGH_D(a, b) KILN_SHUFFLE_D(a, b, 1, 3)
#endif
KILN_INLINE void vd_transpose(vd row[KILN_LANES / 2]) {
    vd other[KILN_LANES / 2];
    KILN_UNROLL for (int round = 1; round < KILN_LANES / 2; round *= 2) {
        KILN_UNROLL for (int i = 0; i < KILN_LANES / 4; i++) {
            other[2 * i] = KILN_LOW_D(row[i], row[i + KILN_LANES / 4]);
            other[2 * i + 1] = KILN_HIGH_D(row[i], row[i + KILN_LANES / 4]);
        }
        __builtin_memcpy(row, other, sizeof other);
    }
}

/* Philox4x32-10: the words of KILN_LANES / 4 consecutive blocks from number `block` on, in order. The four words of a block are four
 * neighbouring lanes, so that a round is one multiplication of the even lanes, and its result lies in reversed order. */
#if KILN_LANES == 16
#define KILN_REVERSED 3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12
#elif KILN_LANES == 8
#define KILN_REVERSED 3, 2, 1, 0, 7, 6, 5, 4
#else
#define KILN_REVERSED 3, 2, 1, 0
#endif
typedef uint64_t vul __attribute__((vector_size(4 * KILN_LANES)));
KILN_INLINE vul vu_mul_even(vu a, vu b) {
#if KILN_LANES == 16 && defined(__AVX512F__) && !defined(__clang__)
    typedef long long vll __attribute__((vector_size(64)));
    return (vul)__builtin_ia32_pmuludq512_mask((vi)a, (vi)b, (vll){0}, (uint8_t)-1);
#elif KILN_LANES == 8 && defined(__AVX2__) && !defined(__clang__)
    return (vul)__builtin_ia32_pmuludq256((vi)a, (vi)b);
#elif KILN_LANES == 4 && defined(__SSE2__) && !defined(__clang__)
    return (vul)__builtin_ia32_pmuludq128((vi)a, (vi)b);
#else
    return ((vul)a & UINT64_C(0xffffffff)) * ((vul)b & UINT64_C(0xffffffff));
#endif
}
KILN_INLINE vu vu_philox(uint64_t seed, uint64_t stream, uint64_t block) {
#define KILN_STATE(l) ((l) % 2 ? stream : UINT64_C(0) + (l) / 2)
#define KILN_EVEN(l) ((l) % 2 ? UINT64_C(0) : ~UINT64_C(0))
#define KILN_BLOCK(l) block
#define KILN_KEY(l) ((l) % 2 ? seed >> 32 : seed & 0xffffffff)
#define KILN_WEYL(l) ((l) % 2 ? UINT64_C(0xBB67AE85) : UINT64_C(0x9E3779B9))
#define KILN_FACTOR(l) ((l) % 2 ? UINT64_C(0xCD9E8D57) : UINT64_C(0xD2511F53))
    vul state = (vul)KILN_EACH_HALF(KILN_STATE) + ((vul)KILN_EACH_HALF(KILN_BLOCK) & (vul)KILN_EACH_HALF(KILN_EVEN));
    vu key = (vu)(vul)KILN_EACH_HALF(KILN_KEY);
    const vu step = (vu)(vul)KILN_EACH_HALF(KILN_WEYL), factor = (vu)(vul)KILN_EACH_HALF(KILN_FACTOR);
    KILN_UNROLL for (int round = 0; round < 10; round++) {
        vi product = (vi)vu_mul_even((vu)state, factor);
        state = (vul)KILN_SHUFFLE(product, product, KILN_REVERSED) ^ (state >> 32) ^ (vul)key;
        key += step;
    }
    return (vu)state;
#undef KILN_STATE
#undef KILN_EVEN
#undef KILN_BLOCK
#undef KILN_KEY
#undef KILN_WEYL
#undef KILN_FACTOR
}
/* Numbers first, first + 1, .. of the stream, uniform in [0, 1); first is a multiple of 4. */
KILN_INLINE vf vf_uniform_aligned(uint64_t seed, uint64_t stream, int64_t first) {
    return __builtin_convertvector((vi)(vu_philox(seed, stream, (uint64_t)first / 4) >> 8), vf) * 0x1p-24f;
}
/* The same of doubles, which take two words each. */
KILN_INLINE vd vd_uniform_aligned(uint64_t seed, uint64_t stream, int64_t first) {
    return __builtin_convertvector((vl)((vul)vu_philox(seed, stream, (uint64_t)first / 2) >> 11), vd) * 0x1p-53;
}

/* Conversions. Float to integer truncates; out of range is the caller's business. */
KILN_INLINE vf vf_from_vi(vi x) { return __builtin_convertvector(x, vf); }
KILN_INLINE vi vi_from_vf(vf x) { return __builtin_convertvector(x, vi); }
typedef struct { vd low, high; } vd_pair;
KILN_INLINE vd_pair vd_from_vf(vf x) {
    vf_half half[2];
    __builtin_memcpy(half, &x, sizeof x);
    return (vd_pair){__builtin_convertvector(half[0], vd), __builtin_convertvector(half[1], vd)};
}
KILN_INLINE vf vf_from_vd(vd_pair x) {
    vf_half half[2] = {__builtin_convertvector(x.low, vf_half), __builtin_convertvector(x.high, vf_half)};
    vf v;
    __builtin_memcpy(&v, half, sizeof v);
    return v;
}

/* bf16 is the upper half of an f32; narrowing rounds to nearest even and keeps NaN quiet. */
KILN_INLINE float sf_from_bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float x;
    __builtin_memcpy(&x, &u, sizeof x);
    return x;
}
KILN_INLINE uint16_t bf16_from_sf(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, sizeof u);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)((u >> 16) | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
/* f16, in integer arithmetic: right on every machine. */
KILN_INLINE float sf_from_f16(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, u;
    float x;
    if (rest >= 0x7c00) {
        u = 0x7f800000 | (rest & 0x3ff) << 13 | (rest > 0x7c00 ? 0x400000 : 0);
    } else if (rest >= 0x400) {
        u = (rest << 13) + ((127 - 15) << 23);
    } else {
        x = (float)(int32_t)rest * 0x1p-24f; /* subnormal: an integer multiple of 2^-24 */
        __builtin_memcpy(&u, &x, sizeof u);
    }
    u |= sign;
    __builtin_memcpy(&x, &u, sizeof x);
    return x;
}
KILN_INLINE uint16_t f16_from_sf(float x) {
    uint32_t u;
    __builtin_memcpy(&u, &x, sizeof u);
    uint32_t sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* 65520 and more round to infinity */
    if (magnitude < 0x38800000) {
        /* Subnormal: adding 0.5 leaves the multiple of 2^-24, rounded to even, in the low bits. */
        float m;
        __builtin_memcpy(&m, &magnitude, sizeof m);
        m += 0.5f;
        __builtin_memcpy(&magnitude, &m, sizeof magnitude);
        return (uint16_t)(sign | (magnitude - 0x3f000000));
    }
    magnitude += 0xfff + ((magnitude >> 13) & 1) - ((127 - 15) << 23);
    return (uint16_t)(sign | magnitude >> 13);
}
typedef uint16_t vu_half __attribute__((vector_size(2 * KILN_LANES)));
/* Each number as 32 bits. gcc 12 converts halves of AVX-512 vectors and joins them, in four instructions. */
KILN_INLINE vu vu_from_halves(vu_half h) {
#if KILN_LANES == 16 && defined(__AVX512F__) && !defined(__clang__)
    vu v;
    __asm__("vpmovzxwd %1, %0" : "=v"(v) : "vm"(h));
    return v;
#else
    return __builtin_convertvector(h, vu);
#endif
}
KILN_INLINE vf vf_load_bf16(const uint16_t *p) {
    vu_half h;
    __builtin_memcpy(&h, p, sizeof h);
    return (vf)(vu_from_halves(h) << 16);
}
KILN_INLINE vu_half vf_round_bf16(vf v) {
    vu u = (vu)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    vi nan = v != v;
    return __builtin_convertvector((vu)vi_select(nan, (vi)((u >> 16) | 0x40), (vi)rounded), vu_half);
}
KILN_INLINE void vf_store_bf16(uint16_t *p, vf v) {
    vu_half h;
#if KILN_LANES == 16 && defined(__AVX512BF16__)
    /* The instruction takes subnormal numbers for zero; 32 is their class. */
    uint16_t subnormal;
    __asm__("vfpclassps $32, %1, %0" : "=k"(subnormal) : "v"(v));
    __asm__("vcvtneps2bf16 %1, %0" : "=v"(h) : "v"(v));
    if (__builtin_expect(subnormal, 0)) h = vf_round_bf16(v);
#else
    h = vf_round_bf16(v);
#endif
    __builtin_memcpy(p, &h, sizeof h);
}
#if KILN_LANES == 16 && defined(__AVX512F__) && !defined(__clang__)
typedef int16_t vs_half __attribute__((vector_size(32)));
typedef long long vll_half __attribute__((vector_size(32)));
KILN_INLINE vf vf_load_f16(const uint16_t *p) {
    vs_half h;
    __builtin_memcpy(&h, p, sizeof h);
    return __builtin_ia32_vcvtph2ps512_mask(h, (vf){0}, (uint16_t)-1, 4);
}
KILN_INLINE void vf_store_f16(uint16_t *p, vf v) {
    vs_half h = __builtin_ia32_vcvtps2ph512_mask(v, 0, (vs_half){0}, (uint16_t)-1);
    __builtin_memcpy(p, &h, sizeof h);
}
#else
KILN_INLINE vf vf_load_f16(const uint16_t *p) {
    vf v;
    KILN_UNROLL for (int l = 0; l < KILN_LANES; l++) v[l] = sf_from_f16(p[l]);
    return v;
}
KILN_INLINE void vf_store_f16(uint16_t *p, vf v) {
    KILN_UNROLL for (int l = 0; l < KILN_LANES; l++) p[l] = f16_from_sf(v[l]);
}
#endif

/* 16-bit numbers p[0], p[stride], ..., or the first n and zeros: gathered as they are, then converted together. */
#define KILN_SPACED(format)                                                        \
    KILN_INLINE vf vf_load_n_##format(const uint16_t *p, int64_t n) {              \
        uint16_t near[KILN_LANES] = {0};                                           \
        if (n == KILN_LANES) return vf_load_##format(p);                           \
        for (int64_t l = 0; l < n; l++) near[l] = p[l];                            \
        return vf_load_##format(near);                                             \
    }                                                                              \
    KILN_INLINE vf vf_load_stride_##format(const uint16_t *p, int64_t stride) {    \
        uint16_t near[KILN_LANES];                                                 \
        KILN_UNROLL for (int l = 0; l < KILN_LANES; l++) near[l] = p[l * stride];  \
        return vf_load_##format(near);                                             \
    }                                                                              \
    KILN_INLINE void vf_store_stride_##format(uint16_t *p, int64_t stride, vf v) { \
        uint16_t near[KILN_LANES];                                                 \
        vf_store_##format(near, v);                                                \
        KILN_UNROLL for (int l = 0; l < KILN_LANES; l++) p[l * stride] = near[l];  \
    }
KILN_SPACED(f16)
KILN_SPACED(bf16)
#undef KILN_SPACED


/* Pairs of bf16: neighbours along the depth of a product, the first in the lower half. They may lie at any even address. */
typedef uint32_t bf16_pair __attribute__((aligned(2)));
KILN_INLINE vu vu_set1(uint32_t x) { return (vu)vi_set1((int32_t)x); }
KILN_INLINE vu vu_load(const bf16_pair *p) { vu v; __builtin_memcpy(&v, p, sizeof v); return v; }
KILN_INLINE void vu_store(bf16_pair *p, vu v) { __builtin_memcpy(p, &v, sizeof v); }
KILN_INLINE void vu_store_n(bf16_pair *p, vu v, int64_t n) { __builtin_memcpy(p, &v, (size_t)n * sizeof *p); }
/* The pairs of the first n halves, the rest zero. */
KILN_INLINE vu vu_load_halves(const uint16_t *p, int64_t n) { vu v = {0}; __builtin_memcpy(&v, p, (size_t)n * sizeof *p); return v; }
KILN_INLINE void vu_transpose(vu row[KILN_LANES]) { vf_transpose((vf *)row); }
/* The pairs of low[l] and high[l] in memory. */
KILN_INLINE vu vu_zip_bf16(const uint16_t *low, const uint16_t *high) {
    vu_half a, b;
    __builtin_memcpy(&a, low, sizeof a);
    __builtin_memcpy(&b, high, sizeof b);
    return vu_from_halves(a) | vu_from_halves(b) << 16;
}
/* Two instructions are written as such: the functions of immintrin.h for them take other types with each compiler. Both take subnormal numbers
 * for zero. */
#if KILN_LANES == 16 && defined(__AVX512BF16__)
/* c + high(a) * high(b), then + low(a) * low(b). */
KILN_INLINE vf vf_dot_bf16(vu a, vu b, vf c) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
    return c;
}
/* The pairs of neighbours in a, then those in b, rounded. */
KILN_INLINE vu vu_pairs_vf(vf a, vf b) {
    vu pairs;
    __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(pairs) : "v"(a), "v"(b));
    return pairs;
}
/* The pairs of low[l] and high[l], rounded. */
KILN_INLINE vu vu_zip_vf(vf low, vf high) {
    typedef uint16_t vh __attribute__((vector_size(64)));
    vh x = (vh)vu_pairs_vf(low, high);
#define KILN_ZIP 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#if defined(__clang__)
    return (vu)__builtin_shufflevector(x, x, KILN_ZIP);
#else
    return (vu)__builtin_shuffle(x, (vh){KILN_ZIP});
#endif
#undef KILN_ZIP
}

/* Tiles of AMX: registers 0 to 7, each of 16 rows of 64 bytes. `t` is a literal number, `ld` counts the 32-bit elements between rows. Where the
 * compiler does not know AMX, tiles are memory. */
#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
/* The form of all eight tiles: palette 1, then 64 bytes a row and 16 rows for each. */
static const uint8_t kiln_tile_form[64] __attribute__((aligned(64), unused)) = {1, [16] = 64, [18] = 64, [20] = 64, [22] = 64, [24] = 64, [26] = 64,
    [28] = 64, [30] = 64, [48] = 16, [49] = 16, [50] = 16, [51] = 16, [52] = 16, [53] = 16, [54] = 16, [55] = 16};
KILN_INLINE void kiln_tiles_begin(void) { __asm__ volatile("ldtilecfg %0" : : "m"(kiln_tile_form)); }
KILN_INLINE void kiln_tiles_end(void) { __asm__ volatile("tilerelease"); }
#define kiln_tile_zero(t) __asm__ volatile("tilezero %%tmm" #t : :)
#define kiln_tile_load(t, from, ld) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t : : "r"(from), "r"((int64_t)(ld) * 4) : "memory")
/* As kiln_tile_load, of lines that are not needed in L1 again. */
#define kiln_tile_stream(t, from, ld) \
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm" #t : : "r"(from), "r"((int64_t)(ld) * 4) : "memory")
#define kiln_tile_store(t, to, ld) \
    __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" : : "r"(to), "r"((int64_t)(ld) * 4) : "memory")
/* Bring a line into L2, and the lines of a tile into L1; they need not exist. */
#define kiln_line_to_l2(from) __asm__ volatile("prefetcht1 (%0)" : : "r"(from))
#define kiln_tile_to_l1(from, ld) \
    KILN_UNROLL for (int l = 0; l < 16; l++) __asm__ volatile("prefetcht0 (%0)" : : "r"((const char *)(from) + l * (int64_t)(ld) * 4))
/* c + a b for tiles of pairs of bf16; takes subnormal numbers for zero. */
#define kiln_tile_dot(c, a, b) __asm__ volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c : :)
#else
static _Thread_local uint32_t kiln_tile_memory[8][16][16] __attribute__((aligned(64), unused));
KILN_INLINE void kiln_tiles_begin(void) { __builtin_memset(kiln_tile_memory, 0, sizeof kiln_tile_memory); }
KILN_INLINE void kiln_tiles_end(void) { __builtin_memset(kiln_tile_memory, 0xff, sizeof kiln_tile_memory); }
KILN_INLINE void kiln_tile_copy_in(uint32_t tile[16][16], const void *from, int64_t ld) {
    for (int r = 0; r < 16; r++) __builtin_memcpy(tile[r], (const char *)from + r * ld * 4, 64);
}
KILN_INLINE void kiln_tile_copy_out(uint32_t tile[16][16], void *to, int64_t ld) {
    for (int r = 0; r < 16; r++) __builtin_memcpy((char *)to + r * ld * 4, tile[r], 64);
}
KILN_INLINE void kiln_tile_multiply(uint32_t c[16][16], uint32_t a[16][16], uint32_t b[16][16]) {
    for (int i = 0; i < 16; i++) {
        vf sum = vf_load((const float *)c[i]);
        for (int k = 0; k < 16; k++) sum = vf_dot_bf16(vu_set1(a[i][k]), vu_load(b[k]), sum);
        vf_store((float *)c[i], sum);
    }
}
#define kiln_tile_zero(t) __builtin_memset(kiln_tile_memory[t], 0, sizeof kiln_tile_memory[t])
#define kiln_tile_load(t, from, ld) kiln_tile_copy_in(kiln_tile_memory[t], from, ld)
#define kiln_tile_store(t, to, ld) kiln_tile_copy_out(kiln_tile_memory[t], to, ld)
#define kiln_tile_stream(t, from, ld) kiln_tile_load(t, from, ld)
#define kiln_line_to_l2(from) (void)0
#define kiln_tile_to_l1(from, ld) (void)0
#define kiln_tile_dot(c, a, b) kiln_tile_multiply(kiln_tile_memory[c], kiln_tile_memory[a], kiln_tile_memory[b])
#endif
#endif

#endif
