// The pointwise operations, as kiln_graph::op defines them.
//
// Registers hold the type that an element is computed in: f32 for the two types of 16 bits, bool for truth
// values. Integers wrap, so they are added as unsigned numbers of 64 bits and cut, which the compiler narrows
// again.

typedef signed char kiln_i8;
typedef short kiln_i16;
typedef int kiln_i32;
typedef long long kiln_i64;
typedef unsigned char kiln_u8;

inline float kiln_infinity() { return __uint_as_float(0x7f800000u); }

// ---- elements in memory ----

inline float kiln_get(kiln_f16 x) { return kiln_widen(x); }
inline float kiln_get(kiln_bf16 x) { return kiln_widen(x); }
template <class T> inline T kiln_get(T x) { return x; }

// What is stored for a register: the two types of 16 bits are rounded.
template <class T> struct kiln_element {
    template <class R> static inline T of(R x) { return (T)x; }
};
template <> struct kiln_element<kiln_f16> {
    static inline kiln_f16 of(float x) { return kiln_narrow<kiln_f16>(x); }
};
template <> struct kiln_element<kiln_bf16> {
    static inline kiln_bf16 of(float x) { return kiln_narrow<kiln_bf16>(x); }
};

// A number that is one of bf16.
inline kiln_bf16 kiln_upper(float x) { return { (kiln_u16)(__float_as_uint(x) >> 16) }; }

// N neighbours, moved at once. The address is a multiple of their size, or of 16.
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) kiln_lanes { T at[N]; };

template <class T> inline float kiln_rounded(float x) { return kiln_widen(kiln_narrow<T>(x)); }

#ifndef KILN_HOST
// The upper half of a word is what it stands for.
template <> inline float kiln_rounded<kiln_bf16>(float x)
{
    kiln_u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(x), "f"(0.0f));
    return __uint_as_float(both);
}
#endif

// An f64 on its way to 16 bits, cut to 13 significant bits of which the last says whether a digit was cut off (rounding to
// odd): f32 has all of these, so that the result is rounded once (kiln_graph::rounding).
inline float kiln_shortened(double x)
{
    const kiln_u64 cut = (1ull << 40) - 1, bits = (kiln_u64)__double_as_longlong(x);
    return (float)__longlong_as_double((long long)(bits & ~cut | (kiln_u64)((bits & cut) != 0) << 40));
}

// The same of an integer of 64 bits. From 2^53 on f64 has not all of its digits: the last 11 are cut off here, likewise.
template <class T> inline float kiln_shortened_integer(T x)
{
    const T most = (T)1 << 53, cut = ((T)1 << 11) - 1;
    const bool far = x >= most || (x < (T)0 && x <= (T)(0 - most));
    return kiln_shortened((double)(far ? (T)(x & ~cut | (T)((x & cut) != 0) << 11) : x));
}

// ---- integers ----

template <class T> inline T kiln_add(T a, T b) { return (T)((kiln_u64)a + (kiln_u64)b); }
template <class T> inline T kiln_sub(T a, T b) { return (T)((kiln_u64)a - (kiln_u64)b); }
template <class T> inline T kiln_mul(T a, T b) { return (T)((kiln_u64)a * (kiln_u64)b); }
template <class T> inline T kiln_neg(T x) { return (T)(0 - (kiln_u64)x); }
template <class T> inline T kiln_abs(T x) { return x < (T)0 ? kiln_neg(x) : x; }
template <class T> inline T kiln_sign(T x) { return (T)((x > (T)0) - (x < (T)0)); }
template <class T> inline bool kiln_is_signed() { return (T)-1 < (T)0; }

// Toward zero; by zero 0.
template <class T> inline T kiln_div(T a, T b)
{
    if (b == 0) return 0;
    if (kiln_is_signed<T>() && b == (T)-1) return kiln_neg(a);
    return (T)(a / b);
}

// With the sign of the divisor; by zero 0.
template <class T> inline T kiln_rem(T a, T b)
{
    if (b == 0 || (kiln_is_signed<T>() && b == (T)-1)) return 0;
    T rest = (T)(a % b);
    return rest != 0 && (rest < (T)0) != (b < (T)0) ? (T)(rest + b) : rest;
}

template <class T> inline T kiln_pow(T a, T b)
{
    if (b < (T)0) return a == (T)1 ? (T)1 : a == (T)-1 ? ((b & 1) ? (T)-1 : (T)1) : (T)0;
    kiln_u64 power = 1, square = (kiln_u64)a;
    for (kiln_u64 left = (kiln_u64)b; left; left >>= 1) {
        if (left & 1) power *= square;
        square *= square;
    }
    return (T)power;
}

// A count that is negative is a large one as an unsigned number.
template <class T> inline T kiln_shl(T a, T b)
{
    return (kiln_u64)b < 8 * sizeof(T) ? (T)((kiln_u64)a << (kiln_u64)b) : (T)0;
}
template <class T> inline T kiln_shr(T a, T b)
{
    return (kiln_u64)b < 8 * sizeof(T) ? (T)(a >> (int)b) : a < (T)0 ? (T)-1 : (T)0;
}

// Float to integer: toward zero, saturating, NaN is 0. BITS are those of the largest number.
template <class T, int BITS, class F> inline T kiln_to_integer(F x)
{
    const T most = (T)(~0ull >> (64 - BITS)), least = kiln_is_signed<T>() ? (T)(-(kiln_i64)most - 1) : (T)0;
    const F end = (F)(1ull << (BITS - 1)) * (F)2;
    return x != x ? (T)0 : x >= end ? most : x <= (F)least ? least : (T)x;
}

// An index that was loaded: out of range it stops the step elsewhere, and here it must not leave the tensor.
inline kiln_u32 kiln_index_u32(kiln_i64 i, kiln_i64 extent)
{
    return (kiln_u32)(i < 0 ? 0 : i >= extent ? extent - 1 : i);
}
inline kiln_u64 kiln_index_u64(kiln_i64 i, kiln_i64 extent)
{
    return (kiln_u64)(i < 0 ? 0 : i >= extent ? extent - 1 : i);
}

// ---- any number ----

template <class T> inline T kiln_larger(T a, T b) { return a > b ? a : b; }
template <class T> inline T kiln_smaller(T a, T b) { return a < b ? a : b; }
// NaN if one is.
#if !defined(KILN_HOST) && __CUDA_ARCH__ >= 800
inline float kiln_larger(float a, float b)
{
    float x;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}
inline float kiln_smaller(float a, float b)
{
    float x;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(x) : "f"(a), "f"(b));
    return x;
}
#else
inline float kiln_larger(float a, float b) { return a > b || a != a ? a : b; }
inline float kiln_smaller(float a, float b) { return a < b || a != a ? a : b; }
#endif
inline double kiln_larger(double a, double b) { return a > b || a != a ? a : b; }
inline double kiln_smaller(double a, double b) { return a < b || a != a ? a : b; }

// ---- floats ----

inline float kiln_abs(float x) { return fabsf(x); }
inline double kiln_abs(double x) { return fabs(x); }
inline float kiln_sign(float x) { return x != x ? x : (float)((x > 0) - (x < 0)); }
inline double kiln_sign(double x) { return x != x ? x : (double)((x > 0) - (x < 0)); }
inline bool kiln_is_inf(float x) { return fabsf(x) == kiln_infinity(); }
inline bool kiln_is_inf(double x) { return fabs(x) == (double)kiln_infinity(); }
inline float kiln_sigmoid(float x)
{
    const float e = expf(-fabsf(x));
    return (x < 0 ? e : 1.0f) / (e + 1.0f);
}
inline double kiln_sigmoid(double x)
{
    const double e = exp(-fabs(x));
    return (x < 0 ? e : 1.0) / (e + 1.0);
}
// A divisor of many numbers: a quotient is the product with the inverse, corrected by what is left of the dividend, which rounds as a
// division does and takes no branch. Divisors near the ends of the range are scaled, and so is the dividend.
struct kiln_divisor {
    float by, inverse, scale;

    __device__ explicit kiln_divisor(float x)
    {
        const float size = fabsf(x);
        // 2^64 below 2^-120, 2^-64 above 2^120.
        scale = size < 7.52316385e-37f ? 18446744073709551616.0f : size > 1.329227996e36f ? 5.42101086e-20f : 1.0f;
        by = x * scale;
        inverse = 1.0f / by;
    }

    // Infinities and NaN leave nothing to correct, and a zero would lose its sign.
    __device__ float of(float a) const
    {
        a *= scale;
        const float first = a * inverse;
        const float corrected = fmaf(fmaf(-first, by, a), inverse, first);
        return first != 0 && fabsf(corrected) < kiln_infinity() ? corrected : first;
    }

    // Within two units in the last place.
    __device__ float near(float a) const { return a * scale * inverse; }
};

inline float kiln_rem(float a, float b)
{
    const float rest = fmodf(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
inline double kiln_rem(double a, double b)
{
    const double rest = fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

// x to the power of -1/2, which is infinite at both zeros and 0 at both infinities.
inline float kiln_inverse_root(float x)
{
    return x == 0 ? kiln_infinity() : fabsf(x) == kiln_infinity() ? 0.0f : 1.0f / sqrtf(x);
}

// 1 / x within one unit in the last place, for every x. On a GPU a division branches for results that are subnormal,
// and a kernel that reads few bytes waits for that.
inline float kiln_reciprocal(float x)
{
#ifdef KILN_HOST
    return 1 / x;
#else
    float result;
    asm("rcp.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#endif
}

// exp(log(u) * s), which at s = -1 is a reciprocal: programs write 1 / (1 + exp(-x)) so.
inline float kiln_power_of(float u, float s)
{
    if (s != -1.0f) return expf(logf(u) * s);
    return kiln_reciprocal(u < 0 ? __uint_as_float(0x7fc00000u) : u + 0.0f);
}

// ---- functions that are a little off ----
//
// With a relative error of 2^-20 (an exponential more, for a large exponent: 2^-24 of it), and perhaps zero for what is
// not normal. They take two to five instructions where correct rounding takes eight to twenty.

#ifdef KILN_HOST
inline float kiln_near_exp(float x) { return expf(x); }
inline float kiln_near_inverse(float x) { return 1 / x; }
inline float kiln_near_sqrt(float x) { return sqrtf(x); }
inline float kiln_near_rsqrt(float x) { return 1 / sqrtf(x); }
inline float kiln_near_quotient(float a, float b) { return a / b; }
inline float kiln_near_clamped(float x, float most) { return x > most ? most : x < -most ? -most : x; }
#else
inline float kiln_near_exp(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504088896341f));
    return y;
}
// 1 / x, of a normal x.
inline float kiln_near_inverse(float x)
{
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
inline float kiln_near_sqrt(float x)
{
    float y;
    asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
inline float kiln_near_rsqrt(float x)
{
    float y;
    asm("rsqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
inline float kiln_near_quotient(float a, float b)
{
    float y;
    asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
    return y;
}
// NaN stays NaN.
inline float kiln_near_clamped(float x, float most)
{
    float y;
    asm("min.NaN.f32 %0, %1, %2;\n\tmax.NaN.f32 %0, %0, %3;" : "=f"(y) : "f"(x), "f"(most), "f"(-most));
    return y;
}
#endif

inline float kiln_near_sigmoid(float x) { return kiln_near_inverse(1.0f + kiln_near_exp(-x)); }

// x times a quotient of polynomials of x^2, fitted on [-3.84, 3.84], beyond which the function is one for an f32.
inline float kiln_near_erf(float x)
{
    x = kiln_near_clamped(x, 3.84f);
    const float z = x * x;
    float above = fmaf(2.0988557e-6f, z, 2.8764905e-4f), below = fmaf(3.8738777e-5f, z, 1.1640869e-3f);
    above = fmaf(above, z, 3.7477936e-3f);
    below = fmaf(below, z, 1.4930954e-2f);
    above = fmaf(above, z, 5.2704554e-2f);
    below = fmaf(below, z, 1.1382715e-1f);
    above = fmaf(above, z, 1.8957974e-1f);
    below = fmaf(below, z, 5.0134277e-1f);
    above = fmaf(above, z, 1.1283791f);
    below = fmaf(below, z, 1.0f);
    return x * above * kiln_near_inverse(below);
}

// As `kiln_power_of`.
inline float kiln_near_power_of(float u, float s)
{
    if (s != -1.0f) return kiln_power_of(u, s);
    return kiln_near_inverse(u < 0 ? __uint_as_float(0x7fc00000u) : u + 0.0f);
}

// ---- random numbers, with the bits of kiln_graph::philox ----

inline kiln_u64 kiln_wide(const kiln_block4& block, int half)
{
    return half ? block.word[2] | (kiln_u64)block.word[3] << 32 : block.word[0] | (kiln_u64)block.word[1] << 32;
}
inline kiln_u32 kiln_pick(const kiln_block4& block, int word)
{
    const kiln_u32 low = word & 1 ? block.word[1] : block.word[0], high = word & 1 ? block.word[3] : block.word[2];
    return word & 2 ? high : low;
}
inline float kiln_uniform_f32(const kiln_block4& block, int i) { return kiln_uniform(kiln_pick(block, i)); }
inline float kiln_uniform_f16(const kiln_block4& block, int i)
{
    return (float)(kiln_pick(block, i) >> 21) * (1.0f / 2048.0f);
}
inline float kiln_uniform_bf16(const kiln_block4& block, int i)
{
    return (float)(kiln_pick(block, i) >> 24) * (1.0f / 256.0f);
}
inline double kiln_uniform_f64(const kiln_block4& block, int i)
{
    return (double)(kiln_wide(block, i & 1) >> 11) * (1.0 / 9007199254740992.0);
}
// Two uniform numbers give two normal ones, those at an even place and behind it.
inline double kiln_box_muller(double u1, double u2, int odd)
{
    const double radius = sqrt(-2.0 * log(1.0 - u1)), angle = 6.283185307179586476925286766559 * u2;
    return radius * (odd ? sin(angle) : cos(angle));
}
inline float kiln_normal_f32(const kiln_block4& block, int i)
{
    const float u1 = kiln_uniform_f32(block, i & 2), u2 = kiln_uniform_f32(block, (i & 2) + 1);
    return (float)kiln_box_muller(u1, u2, i & 1);
}
inline double kiln_normal_f64(const kiln_block4& block, int i)
{
    return kiln_box_muller(kiln_uniform_f64(block, 0), kiln_uniform_f64(block, 1), i & 1);
}
inline kiln_i64 kiln_random_range(const kiln_block4& block, int i, kiln_i64 low, kiln_i64 high)
{
    if (high <= low) return low;
    return (kiln_i64)((kiln_u64)low + kiln_wide(block, i & 1) % ((kiln_u64)high - (kiln_u64)low));
}
