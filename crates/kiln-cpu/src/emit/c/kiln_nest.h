/* What fused loop nests are written in: vectors of KILN_LANES elements of every type, and the pointwise operations.
 *
 * v_T is a vector of KILN_LANES elements of type T; masks are v_i32 with lanes 0 or -1 (a scalar truth value is the
 * int 0 or 1). ld_T, st_T move whole vectors, lda_T is an ld_T that asks for what lies ahead, ldn_T and stn_T move the
 * first n lanes, lds_T and sts_T lanes that lie `stride` elements apart. s_OP_T is an operation on one element, v_OP_T
 * the same on a vector.
 */
#ifndef KILN_NEST_H
#define KILN_NEST_H

#include <stdint.h>
#include <string.h>
#include "kiln_runtime.h"
#include "kiln_math.h"

#ifndef KILN_LEAN
#define KILN_HAS_F64
#define KILN_HAS_I16
#define KILN_HAS_I8
#define KILN_HAS_U64
#define KILN_HAS_U16
#define KILN_HAS_U8
#define KILN_HAS_BOOL
#define KILN_HAS_HALF
#define KILN_HAS_QUOTIENTS
#define KILN_HAS_CASTS
#define KILN_HAS_FOLDS
#define KILN_HAS_RANDOM
#endif
/* What sections need of others. */
#if defined(KILN_HAS_BOOL) && !defined(KILN_HAS_U8)
#define KILN_HAS_U8
#endif
#if defined(KILN_HAS_U8) && !defined(KILN_HAS_I8)
#define KILN_HAS_I8
#endif
#if defined(KILN_HAS_HALF) && !defined(KILN_HAS_U16)
#define KILN_HAS_U16
#endif
#if defined(KILN_HAS_U16) && !defined(KILN_HAS_I16)
#define KILN_HAS_I16
#endif
#if defined(KILN_HAS_RANDOM) && !defined(KILN_HAS_U64)
#define KILN_HAS_U64
#endif

#ifndef INFINITY
#define INFINITY KILN_INF
#endif
#ifndef NAN
#define NAN KILN_NAN
#endif

/* M(..) for the types that this source has. */
#ifdef KILN_HAS_F64
#define KILN_F64(M, ...) M(__VA_ARGS__)
#else
#define KILN_F64(M, ...)
#endif
#ifdef KILN_HAS_I16
#define KILN_I16(M, ...) M(__VA_ARGS__)
#else
#define KILN_I16(M, ...)
#endif
#ifdef KILN_HAS_I8
#define KILN_I8(M, ...) M(__VA_ARGS__)
#else
#define KILN_I8(M, ...)
#endif
#ifdef KILN_HAS_U64
#define KILN_U64(M, ...) M(__VA_ARGS__)
#else
#define KILN_U64(M, ...)
#endif
#ifdef KILN_HAS_U16
#define KILN_U16(M, ...) M(__VA_ARGS__)
#else
#define KILN_U16(M, ...)
#endif
#ifdef KILN_HAS_U8
#define KILN_U8(M, ...) M(__VA_ARGS__)
#else
#define KILN_U8(M, ...)
#endif

/* Asks for a line that is read soon, which may lie behind the end of the memory. With 512 bytes steps of vit_small took
 * 1.02 of the time, with 2,048 and 4,096 the same. Vectors of 16 bytes would ask four times for each line. */
#if KILN_LANES >= 8
#define kiln_ahead(p) __builtin_prefetch((const char *)((uintptr_t)(p) + 1024))
#else
#define kiln_ahead(p) ((void)(p))
#endif

/* Where the lanes of a vector differ, the compiler must not know their values: gcc 12 folds the sum of a constant {1, .., 1, 0, .., 0} as
 * if its upper half were its lower half. They all come from iota, which hides where it reads. */
#define KILN_SAME(l) x
#define KILN_COUNT(l) l
#define KILN_TYPE(T, S)                                                                                     \
    typedef T v_##S __attribute__((vector_size(sizeof(T) * KILN_LANES)));                                   \
    KILN_INLINE v_##S set_##S(T x) { return (v_##S)KILN_EACH(KILN_SAME); }                                  \
    KILN_INLINE v_##S ld_##S(const T *p) { v_##S v; memcpy(&v, p, sizeof v); return v; }                    \
    KILN_INLINE v_##S lda_##S(const T *p) { kiln_ahead(p); return ld_##S(p); }                              \
    KILN_INLINE v_##S iota_##S(void) {                                                                      \
        static const T counted[KILN_LANES] = KILN_EACH(KILN_COUNT);                                         \
        const T *p = counted;                                                                               \
        __asm__("" : "+r"(p));                                                                              \
        return ld_##S(p);                                                                                   \
    }                                                                                                       \
    KILN_INLINE void st_##S(T *p, v_##S v) { memcpy(p, &v, sizeof v); }                                     \
    KILN_INLINE v_##S ldn_##S(const T *p, int64_t n) {                                                      \
        v_##S v = {0};                                                                                      \
        memcpy(&v, p, (size_t)n * sizeof(T));                                                               \
        return v;                                                                                           \
    }                                                                                                       \
    KILN_INLINE void stn_##S(T *p, v_##S v, int64_t n) { memcpy(p, &v, (size_t)n * sizeof(T)); }            \
    KILN_INLINE v_##S lds_##S(const T *p, int64_t stride, int64_t n) {                                      \
        T t[KILN_LANES] = {0};                                                                              \
        for (int64_t l = 0; l < n; l++) t[l] = p[l * stride];                                               \
        return ld_##S(t);                                                                                   \
    }                                                                                                       \
    KILN_INLINE void sts_##S(T *p, int64_t stride, v_##S v, int64_t n) {                                    \
        T t[KILN_LANES];                                                                                    \
        st_##S(t, v);                                                                                       \
        for (int64_t l = 0; l < n; l++) p[l * stride] = t[l];                                               \
    }                                                                                                       \
    KILN_INLINE T get_##S(const T *p) { return *p; }                                                        \
    KILN_INLINE void put_##S(T *p, T x) { *p = x; }

KILN_F64(KILN_TYPE, double, f64)
KILN_TYPE(int64_t, i64)
KILN_TYPE(int32_t, i32)
KILN_I16(KILN_TYPE, int16_t, i16)
KILN_I8(KILN_TYPE, int8_t, i8)
KILN_U64(KILN_TYPE, uint64_t, u64)
KILN_TYPE(uint32_t, u32)
KILN_U16(KILN_TYPE, uint16_t, u16)
KILN_U8(KILN_TYPE, uint8_t, u8)
KILN_TYPE(float, f32)

/* The first n lanes, as a mask. */
KILN_INLINE v_i32 lanes(int64_t n) { return iota_i32() < set_i32((int32_t)n); }

/* mask ? a : b */
#define KILN_SELECT(S, I)                                                                                   \
    KILN_INLINE v_##S sel_##S(v_i32 mask, v_##S a, v_##S b) {                                               \
        v_##I m = __builtin_convertvector(mask, v_##I);                                                     \
        return (v_##S)((m & (v_##I)a) | (~m & (v_##I)b));                                                   \
    }
KILN_F64(KILN_SELECT, f64, i64)
KILN_SELECT(f32, i32)
KILN_SELECT(i64, i64)
KILN_SELECT(i32, i32)
KILN_I16(KILN_SELECT, i16, i16)
KILN_I8(KILN_SELECT, i8, i8)
KILN_U64(KILN_SELECT, u64, i64)
KILN_SELECT(u32, i32)
KILN_U16(KILN_SELECT, u16, i16)
KILN_U8(KILN_SELECT, u8, i8)
KILN_INLINE v_i32 sel_bool(v_i32 mask, v_i32 a, v_i32 b) { return (mask & a) | (~mask & b); }

#ifdef KILN_HAS_BOOL
/* Truth values are bytes in memory. */
KILN_INLINE v_i32 set_bool(int x) { return set_i32(-(x != 0)); }
KILN_INLINE v_i32 bool_of_bytes(v_u8 v) { return __builtin_convertvector((v_i8)(v != 0), v_i32); }
KILN_INLINE v_u8 bytes_of_bool(v_i32 v) { return __builtin_convertvector(v & 1, v_u8); }
KILN_INLINE v_i32 ld_bool(const uint8_t *p) { return bool_of_bytes(ld_u8(p)); }
KILN_INLINE v_i32 lda_bool(const uint8_t *p) { return bool_of_bytes(lda_u8(p)); }
KILN_INLINE v_i32 ldn_bool(const uint8_t *p, int64_t n) { return bool_of_bytes(ldn_u8(p, n)); }
KILN_INLINE v_i32 lds_bool(const uint8_t *p, int64_t stride, int64_t n) { return bool_of_bytes(lds_u8(p, stride, n)); }
KILN_INLINE void st_bool(uint8_t *p, v_i32 v) { st_u8(p, bytes_of_bool(v)); }
KILN_INLINE void stn_bool(uint8_t *p, v_i32 v, int64_t n) { stn_u8(p, bytes_of_bool(v), n); }
KILN_INLINE void sts_bool(uint8_t *p, int64_t stride, v_i32 v, int64_t n) { sts_u8(p, stride, bytes_of_bool(v), n); }
KILN_INLINE int get_bool(const uint8_t *p) { return *p != 0; }
KILN_INLINE void put_bool(uint8_t *p, int x) { *p = x != 0; }
#endif

/* The half types are memory formats; registers hold f32. */
#define KILN_HALF(S)                                                                                        \
    KILN_INLINE v_f32 widen_##S(v_u16 h) {                                                                  \
        uint16_t t[KILN_LANES];                                                                             \
        st_u16(t, h);                                                                                       \
        return vf_load_##S(t);                                                                              \
    }                                                                                                       \
    KILN_INLINE v_u16 narrow_##S(v_f32 x) {                                                                 \
        uint16_t t[KILN_LANES];                                                                             \
        vf_store_##S(t, x);                                                                                 \
        return ld_u16(t);                                                                                   \
    }                                                                                                       \
    KILN_INLINE v_f32 ld_##S(const uint16_t *p) { return vf_load_##S(p); }                                  \
    KILN_INLINE v_f32 lda_##S(const uint16_t *p) { kiln_ahead(p); return ld_##S(p); }                       \
    KILN_INLINE v_f32 ldn_##S(const uint16_t *p, int64_t n) { return widen_##S(ldn_u16(p, n)); }            \
    KILN_INLINE v_f32 lds_##S(const uint16_t *p, int64_t s, int64_t n) { return widen_##S(lds_u16(p, s, n)); } \
    KILN_INLINE void st_##S(uint16_t *p, v_f32 v) { vf_store_##S(p, v); }                                   \
    KILN_INLINE void stn_##S(uint16_t *p, v_f32 v, int64_t n) { stn_u16(p, narrow_##S(v), n); }             \
    KILN_INLINE void sts_##S(uint16_t *p, int64_t s, v_f32 v, int64_t n) { sts_u16(p, s, narrow_##S(v), n); } \
    KILN_INLINE float get_##S(const uint16_t *p) { return sf_from_##S(*p); }                                \
    KILN_INLINE void put_##S(uint16_t *p, float x) { *p = S##_from_sf(x); }                                 \
    KILN_INLINE float s_round_##S(float x) { return sf_from_##S(S##_from_sf(x)); }                          \
    KILN_INLINE v_f32 v_round_##S(v_f32 x) { return widen_##S(narrow_##S(x)); }
#ifdef KILN_HAS_HALF
KILN_HALF(f16)
KILN_HALF(bf16)
#endif

/* An operation on vectors as the operation on each lane. */
#define KILN_LANEWISE1(OP, R, S, TR, TS)                                                                    \
    KILN_INLINE v_##R v_##OP(v_##S x) {                                                                     \
        TS a[KILN_LANES];                                                                                   \
        TR r[KILN_LANES];                                                                                   \
        st_##S(a, x);                                                                                       \
        for (int l = 0; l < KILN_LANES; l++) r[l] = s_##OP(a[l]);                                           \
        return ld_##R(r);                                                                                   \
    }
#define KILN_LANEWISE2(OP, S, T)                                                                            \
    KILN_INLINE v_##S v_##OP(v_##S x, v_##S y) {                                                            \
        T a[KILN_LANES], b[KILN_LANES];                                                                     \
        st_##S(a, x);                                                                                       \
        st_##S(b, y);                                                                                       \
        for (int l = 0; l < KILN_LANES; l++) a[l] = s_##OP(a[l], b[l]);                                     \
        return ld_##S(a);                                                                                   \
    }

/* ---- floats ---- */

#ifdef KILN_HAS_F64
/* An f64 on its way to 16 bits, cut to 13 significant bits of which the last says whether a digit was cut off (rounding
 * to odd): f32 has all of these, so that the result is rounded once (kiln_graph::rounding). */
KILN_INLINE float s_shortened(double x) {
    uint64_t u, cut = ((uint64_t)1 << 40) - 1;
    __builtin_memcpy(&u, &x, sizeof u);
    u = (u & ~cut) | (uint64_t)((u & cut) != 0) << 40;
    __builtin_memcpy(&x, &u, sizeof x);
    return (float)x;
}
KILN_LANEWISE1(shortened, f32, f64, float, double)

/* An integer of 64 bits on its way to 16 bits: f64 would round those of more than 53 bits, which are cut to
 * multiples of 2^11 likewise. Smaller integers are f64s. */
KILN_INLINE float s_shortened_i64(int64_t x) {
    if (x >> 53 != 0 && x >> 53 != -1) x = (x & ~(int64_t)0xfff) | (int64_t)((x & 0xfff) != 0) << 11;
    return s_shortened((double)x);
}
KILN_INLINE float s_shortened_u64(uint64_t x) {
    if (x >> 53 != 0) x = (x & ~(uint64_t)0xfff) | (uint64_t)((x & 0xfff) != 0) << 11;
    return s_shortened((double)x);
}
KILN_INLINE float s_shortened_i32(int32_t x) { return s_shortened((double)x); }
KILN_INLINE float s_shortened_u32(uint32_t x) { return s_shortened((double)x); }
KILN_LANEWISE1(shortened_i64, f32, i64, float, int64_t)
KILN_U64(KILN_LANEWISE1, shortened_u64, f32, u64, float, uint64_t)
KILN_INLINE v_f32 v_shortened_i32(v_i32 x) { return v_shortened(__builtin_convertvector(x, v_f64)); }
KILN_INLINE v_f32 v_shortened_u32(v_u32 x) { return v_shortened(__builtin_convertvector(x, v_f64)); }
#endif

#define KILN_FLOAT(S, T, F)                                                                                 \
    KILN_INLINE T s_sign_##S(T x) { return x != x ? x : (T)((x > 0) - (x < 0)); }                           \
    KILN_INLINE v_##S v_sign_##S(v_##S x) {                                                                 \
        v_##S one = set_##S(1), zero = set_##S(0);                                                          \
        v_##S r = sel_##S(__builtin_convertvector(x > zero, v_i32), one, zero);                             \
        r = sel_##S(__builtin_convertvector(x < zero, v_i32), -one, r);                                     \
        return sel_##S(__builtin_convertvector(x != x, v_i32), x, r);                                       \
    }                                                                                                       \
    KILN_INLINE T s_abs_##S(T x) { return __builtin_fabs##F(x); }                                           \
    KILN_INLINE v_##S v_abs_##S(v_##S x) { return KILN_ABS_##S(x); }                                        \
    KILN_INLINE T s_max_##S(T a, T b) { return (a > b) | (a != a) ? a : b; }                                \
    KILN_INLINE T s_min_##S(T a, T b) { return (a < b) | (a != a) ? a : b; }                                \
    KILN_INLINE v_##S v_max_##S(v_##S a, v_##S b) {                                                         \
        return sel_##S(__builtin_convertvector((a > b) | (a != a), v_i32), a, b);                           \
    }                                                                                                       \
    KILN_INLINE v_##S v_min_##S(v_##S a, v_##S b) {                                                         \
        return sel_##S(__builtin_convertvector((a < b) | (a != a), v_i32), a, b);                           \
    }                                                                                                       \
    KILN_INLINE T s_recip_##S(T x) { return 1 / x; }                                                        \
    KILN_INLINE v_##S v_recip_##S(v_##S x) { return set_##S(1) / x; }                                       \
    KILN_INLINE T s_rsqrt_##S(T x) { return 1 / __builtin_sqrt##F(x); }                                     \
    KILN_INLINE int s_is_nan_##S(T x) { return x != x; }                                                    \
    KILN_INLINE int s_is_inf_##S(T x) { return __builtin_fabs##F(x) == (T)INFINITY; }                       \
    KILN_INLINE v_i32 v_is_nan_##S(v_##S x) { return __builtin_convertvector(x != x, v_i32); }              \
    KILN_INLINE v_i32 v_is_inf_##S(v_##S x) {                                                               \
        return __builtin_convertvector(v_abs_##S(x) == set_##S((T)INFINITY), v_i32);                        \
    }
#define KILN_ABS_f32(x) ((v_f32)((v_i32)(x) & 0x7fffffff))
#define KILN_ABS_f64(x) ((v_f64)((v_i64)(x) & 0x7fffffffffffffffLL))
KILN_FLOAT(f32, float, f)
KILN_F64(KILN_FLOAT, f64, double, )

KILN_INLINE float s_sqrt_f32(float x) { return __builtin_sqrtf(x); }
KILN_INLINE v_f32 v_sqrt_f32(v_f32 x) { return vf_sqrt(x); }
KILN_INLINE v_f32 v_rsqrt_f32(v_f32 x) { return set_f32(1) / vf_sqrt(x); }
#ifdef KILN_HAS_F64
KILN_INLINE double s_sqrt_f64(double x) { return __builtin_sqrt(x); }
KILN_LANEWISE1(sqrt_f64, f64, f64, double, double)
KILN_LANEWISE1(rsqrt_f64, f64, f64, double, double)
#endif

#ifdef KILN_HAS_MATH
#define KILN_FUNCTIONS(S, T, F)                                                                             \
    KILN_INLINE T s_sigmoid_##S(T x) { return 1 / (1 + exp##F(-x)); }                                       \
    KILN_INLINE T s_rem_##S(T a, T b) {                                                                     \
        T rest = fmod##F(a, b);                                                                             \
        return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;                                        \
    }                                                                                                       \
    KILN_INLINE T s_pow_##S(T a, T b) { return pow##F(a, b); }                                              \
    KILN_INLINE T s_atan2_##S(T a, T b) { return atan2##F(a, b); }                                          \
    KILN_INLINE T s_round_##S(T x) { return rint##F(x); }                                                   \
    KILN_LANEWISE2(rem_##S, S, T)                                                                           \
    KILN_LANEWISE2(atan2_##S, S, T)                                                                         \
    KILN_LANEWISE1(round_##S, S, S, T, T)
KILN_FUNCTIONS(f32, float, f)
KILN_F64(KILN_FUNCTIONS, f64, double, )

#define KILN_LIBM(OP)                                                                                       \
    KILN_INLINE float s_##OP##_f32(float x) { return OP##f(x); }                                            \
    KILN_F64(KILN_LIBM_F64, OP)
#define KILN_LIBM_F64(OP)                                                                                   \
    KILN_INLINE double s_##OP##_f64(double x) { return OP(x); }                                             \
    KILN_LANEWISE1(OP##_f64, f64, f64, double, double)
#define KILN_LIBM_LANES(OP) KILN_LANEWISE1(OP##_f32, f32, f32, float, float)
KILN_LIBM(exp)
KILN_LIBM(expm1)
KILN_LIBM(log)
KILN_LIBM(log1p)
KILN_LIBM(sin)
KILN_LIBM(cos)
KILN_LIBM(tan)
KILN_LIBM(asin)
KILN_LIBM(acos)
KILN_LIBM(atan)
KILN_LIBM(sinh)
KILN_LIBM(cosh)
KILN_LIBM(tanh)
KILN_LIBM(asinh)
KILN_LIBM(acosh)
KILN_LIBM(atanh)
KILN_LIBM(erf)
KILN_LIBM(floor)
KILN_LIBM(ceil)
KILN_LIBM(trunc)
KILN_LIBM_LANES(tan)
KILN_LIBM_LANES(asin)
KILN_LIBM_LANES(acos)
KILN_LIBM_LANES(atan)
KILN_LIBM_LANES(sinh)
KILN_LIBM_LANES(cosh)
KILN_LIBM_LANES(asinh)
KILN_LIBM_LANES(acosh)
KILN_LIBM_LANES(atanh)
KILN_LIBM_LANES(floor)
KILN_LIBM_LANES(ceil)
KILN_LIBM_LANES(trunc)
KILN_F64(KILN_LANEWISE1, sigmoid_f64, f64, f64, double, double)
KILN_F64(KILN_LANEWISE2, pow_f64, f64, double)

KILN_INLINE v_f32 v_exp_f32(v_f32 x) { return vf_exp(x); }
KILN_INLINE v_f32 v_expm1_f32(v_f32 x) { return vf_expm1(x); }
KILN_INLINE v_f32 v_log_f32(v_f32 x) { return vf_log(x); }
KILN_INLINE v_f32 v_log1p_f32(v_f32 x) { return vf_log1p(x); }
KILN_INLINE v_f32 v_sin_f32(v_f32 x) { return vf_sin(x); }
KILN_INLINE v_f32 v_cos_f32(v_f32 x) { return vf_cos(x); }
KILN_INLINE v_f32 v_tanh_f32(v_f32 x) { return vf_tanh(x); }
KILN_INLINE v_f32 v_erf_f32(v_f32 x) { return vf_erf(x); }
KILN_INLINE v_f32 v_sigmoid_f32(v_f32 x) { return vf_sigmoid(x); }
KILN_INLINE v_f32 v_pow_f32(v_f32 x, v_f32 y) { return vf_pow(x, y); }

/* exp(log(u) * s), which at s = -1 is a division: programs write 1 / (1 + exp(-x)) so. */
KILN_INLINE v_f32 v_power_of_f32(v_f32 u, float s) {
    if (s != -1.0f) return vf_exp(vf_log(u) * s);
    return sel_f32(u < set_f32(0), set_f32(NAN), set_f32(1) / (u + set_f32(0)));
}
KILN_INLINE float s_power_of_f32(float u, float s) {
    if (s != -1.0f) return v_power_of_f32(set_f32(u), s)[0];
    return u < 0 ? NAN : 1 / (u + 0.0f);
}
#endif

/* ---- integers ---- */

/* M(S, T, U, SIGNED) for the integers that this source has. */
#define KILN_INTEGERS(M)                                                                                    \
    M(i64, int64_t, uint64_t, 1)                                                                            \
    M(i32, int32_t, uint32_t, 1)                                                                            \
    KILN_I16(M, i16, int16_t, uint16_t, 1)                                                                  \
    KILN_I8(M, i8, int8_t, uint8_t, 1)                                                                      \
    KILN_U64(M, u64, uint64_t, uint64_t, 0)                                                                 \
    M(u32, uint32_t, uint32_t, 0)                                                                           \
    KILN_U16(M, u16, uint16_t, uint16_t, 0)                                                                 \
    KILN_U8(M, u8, uint8_t, uint8_t, 0)

#define KILN_INTEGER(S, T, U, SIGNED)                                                                       \
    KILN_INLINE T s_abs_##S(T x) { return SIGNED && x < (T)0 ? (T)(0 - (U)x) : x; }                         \
    KILN_INLINE T s_sign_##S(T x) { return (T)((x > 0) - (SIGNED && x < (T)0)); }                           \
    KILN_INLINE T s_max_##S(T a, T b) { return a > b ? a : b; }                                             \
    KILN_INLINE T s_min_##S(T a, T b) { return a < b ? a : b; }                                             \
    KILN_INLINE v_##S v_max_##S(v_##S a, v_##S b) { return sel_##S(__builtin_convertvector(a > b, v_i32), a, b); } \
    KILN_INLINE v_##S v_min_##S(v_##S a, v_##S b) { return sel_##S(__builtin_convertvector(a < b, v_i32), a, b); } \
    KILN_LANEWISE1(abs_##S, S, S, T, T)                                                                     \
    KILN_LANEWISE1(sign_##S, S, S, T, T)
KILN_INTEGERS(KILN_INTEGER)

#ifdef KILN_HAS_QUOTIENTS
/* Quotients, powers and shifts. */
#define KILN_QUOTIENTS(S, T, U, SIGNED)                                                                     \
    KILN_INLINE T s_div_##S(T a, T b) { return b == 0 ? 0 : SIGNED && b == (T)-1 ? (T)(0 - (U)a) : (T)(a / b); } \
    KILN_INLINE T s_rem_##S(T a, T b) {                                                                     \
        if (b == 0 || (SIGNED && b == (T)-1)) return 0;                                                     \
        T r = a % b;                                                                                        \
        return SIGNED && r != 0 && (r < (T)0) != (b < (T)0) ? (T)(r + b) : r;                               \
    }                                                                                                       \
    KILN_INLINE T s_pow_##S(T a, T b) {                                                                     \
        if (SIGNED && b < (T)0) return a == 1 ? 1 : a == (T)-1 ? (b & 1 ? (T)-1 : 1) : 0;                   \
        U r = 1, f = (U)a;                                                                                  \
        for (U e = (U)b; e; e >>= 1) {                                                                      \
            if (e & 1) r = (U)(r * f);                                                                      \
            f = (U)(f * f);                                                                                 \
        }                                                                                                   \
        return (T)r;                                                                                        \
    }                                                                                                       \
    KILN_INLINE T s_shl_##S(T a, T b) {                                                                     \
        return (SIGNED && b < (T)0) || (uint64_t)b >= 8 * sizeof(T) ? 0 : (T)((U)a << b);                   \
    }                                                                                                       \
    KILN_INLINE T s_shr_##S(T a, T b) {                                                                     \
        return (uint64_t)b >= 8 * sizeof(T) ? (T)(SIGNED && a < (T)0 ? -1 : 0) : (T)(a >> b);               \
    }                                                                                                       \
    KILN_LANEWISE2(div_##S, S, T)                                                                           \
    KILN_LANEWISE2(rem_##S, S, T)                                                                           \
    KILN_LANEWISE2(pow_##S, S, T)                                                                           \
    KILN_LANEWISE2(shl_##S, S, T)                                                                           \
    KILN_LANEWISE2(shr_##S, S, T)
KILN_INTEGERS(KILN_QUOTIENTS)
#endif

#ifdef KILN_HAS_CASTS
/* Float to integer: toward zero, saturating, NaN is 0. */
#define KILN_TO_INTEGER(S, T, MIN, MAX)                                                                     \
    KILN_INLINE T s_f32_to_##S(float x) { return x != x ? 0 : x >= (float)MAX ? MAX : x <= (float)MIN ? MIN : (T)x; } \
    KILN_LANEWISE1(f32_to_##S, S, f32, T, float)                                                            \
    KILN_F64(KILN_F64_TO_INTEGER, S, T, MIN, MAX)
#define KILN_F64_TO_INTEGER(S, T, MIN, MAX)                                                                 \
    KILN_INLINE T s_f64_to_##S(double x) { return x != x ? 0 : x >= (double)MAX ? MAX : x <= (double)MIN ? MIN : (T)x; } \
    KILN_LANEWISE1(f64_to_##S, S, f64, T, double)
KILN_TO_INTEGER(i64, int64_t, INT64_MIN, INT64_MAX)
KILN_TO_INTEGER(i32, int32_t, INT32_MIN, INT32_MAX)
KILN_I16(KILN_TO_INTEGER, i16, int16_t, INT16_MIN, INT16_MAX)
KILN_I8(KILN_TO_INTEGER, i8, int8_t, INT8_MIN, INT8_MAX)
KILN_U64(KILN_TO_INTEGER, u64, uint64_t, 0, UINT64_MAX)
KILN_TO_INTEGER(u32, uint32_t, 0, UINT32_MAX)
KILN_U16(KILN_TO_INTEGER, u16, uint16_t, 0, UINT16_MAX)
KILN_U8(KILN_TO_INTEGER, u8, uint8_t, 0, UINT8_MAX)
#endif

KILN_INLINE int64_t clamp_index(int64_t i, int64_t extent) { return i < 0 ? 0 : i >= extent ? extent - 1 : i; }
KILN_INLINE v_i64 v_clamp_index(v_i64 i, int64_t extent) {
    return v_min_i64(v_max_i64(i, set_i64(0)), set_i64(extent - 1));
}

/* ---- lanes to one value: halves onto each other, always in this order ---- */

#ifdef KILN_HAS_FOLDS
#define KILN_FOLD(OP, S, T, EXPR)                                                                           \
    KILN_INLINE T fold_##OP##_##S(v_##S v) {                                                                \
        T t[KILN_LANES];                                                                                    \
        st_##S(t, v);                                                                                       \
        for (int half = KILN_LANES / 2; half > 0; half /= 2)                                                \
            for (int l = 0; l < half; l++) {                                                                \
                T a = t[l], b = t[l + half];                                                                \
                t[l] = EXPR;                                                                                \
            }                                                                                               \
        return t[0];                                                                                        \
    }
#define KILN_FOLDS(S, T)                                                                                    \
    KILN_FOLD(sum, S, T, (T)(a + b))                                                                        \
    KILN_FOLD(prod, S, T, (T)(a * b))                                                                       \
    KILN_FOLD(max, S, T, s_max_##S(a, b))                                                                   \
    KILN_FOLD(min, S, T, s_min_##S(a, b))
KILN_F64(KILN_FOLDS, f64, double)
KILN_FOLDS(f32, float)
KILN_FOLDS(i64, int64_t)
KILN_FOLDS(i32, int32_t)
KILN_I16(KILN_FOLDS, i16, int16_t)
KILN_I8(KILN_FOLDS, i8, int8_t)
KILN_U64(KILN_FOLDS, u64, uint64_t)
KILN_FOLDS(u32, uint32_t)
KILN_U16(KILN_FOLDS, u16, uint16_t)
KILN_U8(KILN_FOLDS, u8, uint8_t)
KILN_INLINE int fold_any_bool(v_i32 v) {
    for (int l = 0; l < KILN_LANES; l++) if (v[l]) return 1;
    return 0;
}
KILN_INLINE int fold_all_bool(v_i32 v) {
    for (int l = 0; l < KILN_LANES; l++) if (!v[l]) return 0;
    return 1;
}
#endif

/* ---- random numbers: Philox4x32-10 ---- */

#ifdef KILN_HAS_RANDOM
typedef struct { uint32_t w[4]; } kiln_block;
KILN_INLINE kiln_block philox(uint64_t seed, uint64_t stream, uint64_t block) {
    uint32_t c0 = (uint32_t)block, c1 = (uint32_t)(block >> 32), c2 = (uint32_t)stream, c3 = (uint32_t)(stream >> 32);
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)p1;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (kiln_block){{c0, c1, c2, c3}};
}
KILN_INLINE uint32_t random_word(uint64_t seed, uint64_t stream, int64_t i) {
    return philox(seed, stream, (uint64_t)i / 4).w[i % 4];
}
KILN_INLINE uint64_t random_wide(uint64_t seed, uint64_t stream, int64_t i) {
    kiln_block b = philox(seed, stream, (uint64_t)i / 2);
    return i % 2 ? b.w[2] | (uint64_t)b.w[3] << 32 : b.w[0] | (uint64_t)b.w[1] << 32;
}
KILN_INLINE double uniform_f64(uint64_t seed, uint64_t stream, int64_t i) {
    return (double)(random_wide(seed, stream, i) >> 11) * 0x1p-53;
}
KILN_INLINE float uniform_f32(uint64_t seed, uint64_t stream, int64_t i) {
    return (float)(random_word(seed, stream, i) >> 8) * 0x1p-24f;
}
KILN_INLINE float uniform_f16(uint64_t seed, uint64_t stream, int64_t i) {
    return (float)(random_word(seed, stream, i) >> 21) * 0x1p-11f;
}
KILN_INLINE float uniform_bf16(uint64_t seed, uint64_t stream, int64_t i) {
    return (float)(random_word(seed, stream, i) >> 24) * 0x1p-8f;
}
#ifdef KILN_HAS_MATH
KILN_INLINE double normal_of(double u1, double u2, int64_t i) {
    double radius = sqrt(-2.0 * log(1.0 - u1)), angle = 6.283185307179586476925286766559 * u2;
    return radius * (i % 2 ? sin(angle) : cos(angle));
}
KILN_INLINE double normal_f64(uint64_t seed, uint64_t stream, int64_t i) {
    int64_t first = i & ~(int64_t)1;
    return normal_of(uniform_f64(seed, stream, first), uniform_f64(seed, stream, first + 1), i);
}
KILN_INLINE float normal_f32(uint64_t seed, uint64_t stream, int64_t i) {
    int64_t first = i & ~(int64_t)1;
    return (float)normal_of(uniform_f32(seed, stream, first), uniform_f32(seed, stream, first + 1), i);
}
#endif
KILN_INLINE int64_t random_range(uint64_t seed, uint64_t stream, int64_t i, int64_t low, int64_t high) {
    if (high <= low) return low;
    return (int64_t)((uint64_t)low + random_wide(seed, stream, i) % ((uint64_t)high - (uint64_t)low));
}
/* Products of 32-bit lanes: the upper halves replace `a`, the lower ones are returned. */
KILN_INLINE vu vu_multiply(vu *a, uint32_t by) {
    const vul low = (vul)(set_u32(~0u)) >> 32;
    const vu factor = set_u32(by);
    const vul even = vu_mul_even(*a, factor), odd = vu_mul_even((vu)((vul)*a >> 32), factor);
    *a = (vu)((even >> 32) | (odd & ~low));
    return (vu)((even & low) | (odd << 32));
}
/* Lanes at any positions, each with a block of its own. */
KILN_INLINE v_f32 v_uniform_f32_at(uint64_t seed, uint64_t stream, v_i64 i) {
    const v_u64 block = (v_u64)i >> 2;
    vu c0 = __builtin_convertvector(block, vu), c1 = __builtin_convertvector(block >> 32, vu);
    vu c2 = set_u32((uint32_t)stream), c3 = set_u32((uint32_t)(stream >> 32));
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    KILN_UNROLL for (int round = 0; round < 10; round++) {
        vu high0 = c0, high1 = c2;
        const vu low0 = vu_multiply(&high0, 0xD2511F53u), low1 = vu_multiply(&high1, 0xCD9E8D57u);
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    const v_i32 which = __builtin_convertvector(i & 3, v_i32);
    const vu low = sel_u32(which == 0, c0, c1), high = sel_u32(which == 2, c2, c3);
    return __builtin_convertvector((v_i32)(sel_u32(which < 2, low, high) >> 8), v_f32) * 0x1p-24f;
}
/* Lanes at consecutive positions share blocks. */
KILN_INLINE v_f32 v_uniform_f32(uint64_t seed, uint64_t stream, int64_t i) {
    if (i % 4 == 0) return (v_f32)vf_uniform_aligned(seed, stream, i);
    float t[2 * KILN_LANES];
    vf_store(t, vf_uniform_aligned(seed, stream, i - i % 4));
    vf_store(t + KILN_LANES, vf_uniform_aligned(seed, stream, i - i % 4 + KILN_LANES));
    return ld_f32(t + i % 4);
}
#endif

#endif
