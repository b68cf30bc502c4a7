/* Elementary functions on vectors of floats.
 *
 * Each reduces its argument to a small interval, evaluates a polynomial there and scales back; the coefficients are
 * minimax fits in relative error of the result. Bounds in units in the last place (ULP) against the exact value, over
 * all finite f32, are stated at each function and checked by the tests over a dense sample of all 2^32 bit patterns.
 * Subnormal arguments and results are exact to the same bounds unless stated; NaN gives NaN; infinities and zeros
 * give what C's <math.h> gives, sign of zero included. Without a fused multiply-add the bounds grow by about half.
 */
#ifndef KILN_MATH_H
#define KILN_MATH_H

#include "kiln_vector.h"

/* To read all that there is takes a compiler as long as to compile a short source. One that defines KILN_LEAN has the
 * sections alone that it names with the macros KILN_HAS_..; any other has all. */
#if !defined(KILN_LEAN) || defined(KILN_HAS_MATH)
#ifndef KILN_HAS_MATH
#define KILN_HAS_MATH
#endif
#include <math.h>
#endif

#define KILN_INF __builtin_inff()
#define KILN_NAN __builtin_nanf("")

/* 1.5 ULP. */
KILN_INLINE vf vf_rsqrt(vf x) { return 1.0f / vf_sqrt(x); }

/* One value at a time, with the same bits as a lane of what is named alike. */
#define KILN_SCALAR(NAME) KILN_INLINE float sf_##NAME(float x) { return vf_##NAME(vf_set1(x))[0]; }
KILN_SCALAR(sqrt)
KILN_SCALAR(rsqrt)

#ifdef KILN_HAS_MATH

/* x * 2^n for n in [-252, 254], in two factors, so that subnormal results are rounded once. */
KILN_INLINE vf vf_scale(vf x, vi n) {
    vi half = n >> 1;
    return x * (vf)((half + 127) << 23) * (vf)((n - half + 127) << 23);
}

/* To the nearest integer, halves to even, for |x| < 2^22. */
KILN_INLINE vf vf_round_small(vf x) { return (x + 12582912.0f) - 12582912.0f; }

/* exp(r) = 1 + r + r^2 P(r) on |r| <= ln(2)/2; P is shared by exp and expm1. */
KILN_INLINE vf vf_exp_poly(vf r) {
    vf p = vf_set1(0x1.6a2430p-10f);
    p = vf_fma(p, r, vf_set1(0x1.1239e4p-7f));
    p = vf_fma(p, r, vf_set1(0x1.5558f2p-5f));
    p = vf_fma(p, r, vf_set1(0x1.555492p-3f));
    return vf_fma(p, r, vf_set1(0x1.fffffcp-2f));
}

/* x = n ln(2) + r; ln(2) in two parts, the first short enough that n times it is exact. */
KILN_INLINE vf vf_exp_reduce(vf x, vf *n) {
    *n = vf_round_small(x * 1.44269504f);
    vf r = vf_fma(*n, vf_set1(-0x1.62e400p-1f), x);
    return vf_fma(*n, vf_set1(-0x1.7f7d1cp-20f), r);
}

/* 1.1 ULP; overflows to infinity above 88.72284, to zero below -103.97208. */
KILN_INLINE vf vf_exp(vf x) {
    vf n, c = vf_select(x > 89.0f, vf_set1(89.0f), x);
    c = vf_select(c < -104.5f, vf_set1(-104.5f), c);
    vf r = vf_exp_reduce(c, &n);
    vf p = vf_fma(vf_exp_poly(r), r * r, r) + 1.0f;
    /* A NaN lane has no integer; any will do. */
    vi k = vi_from_vf(vf_select(n == n, n, (vf){0}));
    return vf_scale(p, k);
}

/* exp of x <= 0, for sums of such: 1.1 ULP down to -87.3, zero below. */
KILN_INLINE vf vf_exp_down(vf x) {
    vf n, r = vf_exp_reduce(vf_larger(vf_set1(-87.33f), x), &n);
    vf p = vf_fma(vf_exp_poly(r), r * r, r) + 1.0f;
    vf y = p * (vf)((vi_from_vf(n) + 127) << 23);
    return vf_select(x < -87.33f, (vf){0}, y);
}

/* The same in double: 1.1 ULP down to -708, zero below. */
KILN_INLINE vd vd_exp_down(vd x) {
    vd c = vd_larger(vd_set1(-708.0), x);
    /* The sum with 1.5 * 2^52 is rounded to an integer, which its low bits hold. */
    vd t = vd_fma(c, vd_set1(0x1.71547652b82fep+0), vd_set1(0x1.8p52)), n = t - 0x1.8p52;
    vd r = vd_fma(n, vd_set1(-0x1.62e42feep-1), c);
    r = vd_fma(n, vd_set1(-0x1.a39ef35793c76p-33), r);
    /* exp(r) = 1 + r + r^2 P(r), the Taylor series: the term after the last is 4e-18 at most. */
    vd p = vd_set1(1.0 / 6227020800.0);
    p = vd_fma(p, r, vd_set1(1.0 / 479001600.0));
    p = vd_fma(p, r, vd_set1(1.0 / 39916800.0));
    p = vd_fma(p, r, vd_set1(1.0 / 3628800.0));
    p = vd_fma(p, r, vd_set1(1.0 / 362880.0));
    p = vd_fma(p, r, vd_set1(1.0 / 40320.0));
    p = vd_fma(p, r, vd_set1(1.0 / 5040.0));
    p = vd_fma(p, r, vd_set1(1.0 / 720.0));
    p = vd_fma(p, r, vd_set1(1.0 / 120.0));
    p = vd_fma(p, r, vd_set1(1.0 / 24.0));
    p = vd_fma(p, r, vd_set1(1.0 / 6.0));
    p = vd_fma(p, r, vd_set1(0.5));
    vd y = (vd_fma(p, r * r, r) + 1.0) * (vd)(((vl)t + 1023) << 52);
    return vd_select(x < -708.0, (vd){0}, y);
}

/* 1.6 ULP; exact near zero, -1 for large negative arguments. */
KILN_INLINE vf vf_expm1(vf x) {
    vf n, c = vf_select(x > 89.0f, vf_set1(89.0f), x);
    c = vf_select(c < -30.0f, vf_set1(-30.0f), c);
    vf r = vf_exp_reduce(c, &n);
    vf p = vf_fma(vf_exp_poly(r), r * r, r);
    vi k = vi_from_vf(vf_select(n == n, n, (vf){0}));
    /* 2^n p + (2^n - 1), with half of 2^n so that n = 128 does not overflow too early. */
    vf half = (vf)((k + 126) << 23);
    vf y = vf_fma(half, p, half - 0.5f) * 2.0f;
    /* Where n = 0 the sum above would lose small results, and the sign of zero is lost even in p. */
    return vf_select(vf_abs(x) < 0x1p-25f, x, vf_select(k == 0, p, y));
}

/* log(m) - f + f^2/2 = f^3 P(f) with f = m - 1, sqrt(1/2) <= m < sqrt(2). */
KILN_INLINE vf vf_log_poly(vf f) {
    vf p = vf_set1(0x1.14573ep-4f);
    p = vf_fma(p, f, vf_set1(-0x1.de3bf8p-4f));
    p = vf_fma(p, f, vf_set1(0x1.e6f08cp-4f));
    p = vf_fma(p, f, vf_set1(-0x1.fc220ep-4f));
    p = vf_fma(p, f, vf_set1(0x1.233766p-3f));
    p = vf_fma(p, f, vf_set1(-0x1.555c4ep-3f));
    p = vf_fma(p, f, vf_set1(0x1.99a4b6p-3f));
    p = vf_fma(p, f, vf_set1(-0x1.000006p-2f));
    return vf_fma(p, f, vf_set1(0x1.555548p-2f));
}

/* x = 2^e m with m in [sqrt(1/2), sqrt(2)), for positive finite x. */
KILN_INLINE vf vf_log_reduce(vf x, vf *e) {
    vi tiny = x < 0x1p-126f;
    x = vf_select(tiny, x * 0x1p23f, x);
    /* Counted from sqrt(1/2), the exponent field changes where m wraps round. */
    vi bits = (vi)x - 0x3f3504f3;
    *e = vf_from_vi((bits >> 23) + (tiny & -23));
    return (vf)((bits & 0x7fffff) + 0x3f3504f3);
}

/* What log gives outside the positive finite numbers. */
KILN_INLINE vf vf_log_special(vf x, vf y) {
    y = vf_select(x == KILN_INF, x, y);
    y = vf_select(x == 0.0f, vf_set1(-KILN_INF), y);
    return vf_select((x < 0.0f) | (x != x), vf_set1(KILN_NAN), y);
}

/* 1.1 ULP; log(0) = -inf, negative gives NaN. */
KILN_INLINE vf vf_log(vf x) {
    vf e, f = vf_log_reduce(x, &e) - 1.0f;
    vf s = f * f;
    vf y = vf_fma(vf_log_poly(f) * f, s, e * -0x1.05c610p-29f);
    y = vf_fma(s, vf_set1(-0.5f), y);
    return vf_log_special(x, vf_fma(e, vf_set1(0x1.62e430p-1f), f + y));
}

/* 1.1 ULP; log1p(-1) = -inf, below that NaN. */
KILN_INLINE vf vf_log1p(vf x) {
    vf u = x + 1.0f;
    vf e, f = vf_log_reduce(u, &e) - 1.0f;
    /* What rounding 1 + x lost, to be divided by u. */
    vf lost = vf_select(x > 1.0f, 1.0f - (u - x), x - (u - 1.0f)) / u;
    vf s = f * f;
    vf y = vf_fma(vf_log_poly(f) * f, s, vf_fma(e, vf_set1(-0x1.05c610p-29f), lost));
    y = vf_fma(s, vf_set1(-0.5f), y);
    y = vf_log_special(u, vf_fma(e, vf_set1(0x1.62e430p-1f), f + y));
    /* Below half an ULP of 1 the sum above keeps nothing of x; zero keeps its sign. */
    return vf_select(vf_abs(x) < 0x1p-25f, x, y);
}

/* 1.5 ULP; tanh of 9.1 and more is 1. */
KILN_INLINE vf vf_tanh(vf x) {
    vf a = vf_abs(x), s = x * x;
    vf p = vf_set1(-0x1.75e1dcp-8f);
    p = vf_fma(p, s, vf_set1(0x1.52269ep-6f));
    p = vf_fma(p, s, vf_set1(-0x1.b83c5ap-5f));
    p = vf_fma(p, s, vf_set1(0x1.110726p-3f));
    p = vf_fma(p, s, vf_set1(-0x1.555532p-2f));
    vf small = vf_fma(p * s, x, x);
    vf large = 1.0f - 2.0f / (vf_exp(2.0f * vf_select(a > 10.0f, vf_set1(10.0f), a)) + 1.0f);
    return vf_copysign(vf_select(a < 0.625f, small, large), x);
}

/* 2.5 ULP (at negative arguments; 1.5 at positive ones); 0 and 1 at the ends, subnormal results included. */
KILN_INLINE vf vf_sigmoid(vf x) {
    vf e = vf_exp((vf)((vi)x | (int32_t)0x80000000));
    return vf_select(x < 0.0f, e, vf_set1(1.0f)) / (e + 1.0f);
}

/* 1.4 ULP; erf of 3.92 and more is 1. */
KILN_INLINE vf vf_erf(vf x) {
    vf a = vf_abs(x), s = x * x;
    /* erf(x) = x + x P(x^2) on [0, 1] */
    vf p = vf_set1(0x1.496bf2p-14f);
    p = vf_fma(p, s, vf_set1(-0x1.a3f7b8p-11f));
    p = vf_fma(p, s, vf_set1(0x1.5405cep-8f));
    p = vf_fma(p, s, vf_set1(-0x1.b7f912p-6f));
    p = vf_fma(p, s, vf_set1(0x1.ce2cf8p-4f));
    p = vf_fma(p, s, vf_set1(-0x1.81273ep-2f));
    p = vf_fma(p, s, vf_set1(0x1.06eba8p-3f));
    vf small = vf_fma(p, x, x);
    /* erf(x) = 1 - exp(Q(x)) beyond */
    vf c = vf_select(a > 4.0f, vf_set1(4.0f), a);
    vf q = vf_set1(-0x1.6c06dcp-16f);
    q = vf_fma(q, c, vf_set1(0x1.ceeb26p-12f));
    q = vf_fma(q, c, vf_set1(-0x1.13990cp-8f));
    q = vf_fma(q, c, vf_set1(0x1.9d0be2p-6f));
    q = vf_fma(q, c, vf_set1(-0x1.bc18d6p-4f));
    q = vf_fma(q, c, vf_set1(-0x1.4434f0p-1f));
    q = vf_fma(q, c, vf_set1(-0x1.212c2ep+0f));
    q = vf_fma(q, c, vf_set1(0x1.8b4030p-13f));
    vf large = vf_copysign(1.0f - vf_exp(q), x);
    return vf_select(a < 1.0f, small, vf_select(x == x, large, x));
}

/* sin(r) and cos(r) on |r| <= pi/4, chosen by the quadrant. */
KILN_INLINE vf vf_sincos_poly(vf r, vi quadrant) {
    vf s = r * r;
    vf p = vf_fma(vf_set1(0x1.6ccf5ep-19f), s, vf_set1(-0x1.a00f74p-13f));
    p = vf_fma(p, s, vf_set1(0x1.111108p-7f));
    p = vf_fma(p, s, vf_set1(-0x1.555556p-3f));
    vf sine = vf_fma(p * s, r, r);
    vf q = vf_fma(vf_set1(0x1.99e86ap-16f), s, vf_set1(-0x1.6c0c28p-10f));
    q = vf_fma(q, s, vf_set1(0x1.55554ap-5f));
    vf cosine = vf_fma(q * s, s, vf_fma(s, vf_set1(-0.5f), vf_set1(1.0f)));
    vf y = vf_select((quadrant & 1) != 0, cosine, sine);
    return (vf)((vi)y ^ ((quadrant & 2) << 30));
}

/* x minus the nearest multiple of pi/2, which is in four parts of which the first three times n are exact. */
KILN_INLINE vf vf_sincos_reduce(vf x, vi *n) {
    vf k = vf_round_small(x * 0x1.45f306p-1f);
    *n = vi_from_vf(vf_select(vf_abs(k) < 4194304.0f, k, (vf){0}));
    vf r = vf_fma(k, vf_set1(-0x1.920000p+0f), x);
    r = vf_fma(k, vf_set1(-0x1.fb4000p-12f), r);
    r = vf_fma(k, vf_set1(-0x1.444000p-24f), r);
    return vf_fma(k, vf_set1(-0x1.68c234p-39f), r);
}

/* Arguments from here on need more digits of pi than the above has; the C library has them. */
#define KILN_LARGE_ANGLE 4000.0f

/* 2.5 ULP below 4000 in magnitude; beyond, that of the C library. Infinity gives NaN. */
KILN_INLINE vf vf_sin(vf x) {
    vi n;
    vf r = vf_sincos_reduce(x, &n);
    vf y = vf_sincos_poly(r, n);
    y = vf_select(x == 0.0f, x, y);
    if (__builtin_expect(vi_any(vf_abs(x) > KILN_LARGE_ANGLE), 0)) {
        for (int l = 0; l < KILN_LANES; l++)
            if (__builtin_fabsf(x[l]) > KILN_LARGE_ANGLE) y[l] = sinf(x[l]);
    }
    return y;
}

/* 2.5 ULP below 4000 in magnitude; beyond, that of the C library. Infinity gives NaN. */
KILN_INLINE vf vf_cos(vf x) {
    vi n;
    vf r = vf_sincos_reduce(x, &n);
    vf y = vf_sincos_poly(r, n + 1);
    if (__builtin_expect(vi_any(vf_abs(x) > KILN_LARGE_ANGLE), 0)) {
        for (int l = 0; l < KILN_LANES; l++)
            if (__builtin_fabsf(x[l]) > KILN_LARGE_ANGLE) y[l] = cosf(x[l]);
    }
    return y;
}

/* log2 of a positive finite double, to 1e-14. */
KILN_INLINE vd vd_log2(vd x) {
    vl bits = (vl)x - 0x3fe6a09e667f3bcdLL;
    vl e = bits >> 52;
    vd m = (vd)((bits & 0xfffffffffffffLL) + 0x3fe6a09e667f3bcdLL);
    /* log(m) = 2 atanh(t) */
    vd t = (m - 1.0) / (m + 1.0), s = t * t;
    vd p = vd_set1(0x1.5887fac32c4f5p-4);
    p = vd_fma(p, s, vd_set1(0x1.732adb65fc1abp-4));
    p = vd_fma(p, s, vd_set1(0x1.c7228193426fap-4));
    p = vd_fma(p, s, vd_set1(0x1.24924168173e2p-3));
    p = vd_fma(p, s, vd_set1(0x1.999999a2a97d4p-3));
    p = vd_fma(p, s, vd_set1(0x1.5555555553915p-2));
    vd log = vd_fma(p * s, t, t) * 0x1.71547652b82fep+1;
    return log + __builtin_convertvector(e, vd);
}

/* 2^x for |x| <= 400, to 2e-14. */
KILN_INLINE vd vd_exp2(vd x) {
    vd n = (x + 0x1.8p52) - 0x1.8p52, r = x - n;
    vd p = vd_set1(0x1.b3f1ef541a272p-24);
    p = vd_fma(p, r, vd_set1(0x1.63edeb1392814p-20));
    p = vd_fma(p, r, vd_set1(0x1.ffce26da34a50p-17));
    p = vd_fma(p, r, vd_set1(0x1.43088fc9db3cap-13));
    p = vd_fma(p, r, vd_set1(0x1.5d87fd8f40bbbp-10));
    p = vd_fma(p, r, vd_set1(0x1.3b2ab72a138f6p-7));
    p = vd_fma(p, r, vd_set1(0x1.c6b08d70d2b53p-5));
    p = vd_fma(p, r, vd_set1(0x1.ebfbdff815650p-3));
    p = vd_fma(p, r, vd_set1(0x1.62e42fefa3751p-1));
    p = vd_fma(p, r, vd_set1(0x1.000000000003dp+0));
    return p * (vd)((__builtin_convertvector(n, vl) + 1023) << 52);
}

KILN_INLINE vd vd_pow_positive(vd x, vd y) {
    vd e = y * vd_log2(x);
    e = vd_select(e > 400.0, vd_set1(400.0), e);
    return vd_exp2(vd_select(e < -400.0, vd_set1(-400.0), e));
}

/* 0.6 ULP, computed in double; the special cases of C's pow, all of them. */
KILN_INLINE vf vf_pow(vf x, vf y) {
    vf a = vf_abs(x), b = vf_abs(y);
    /* Zero, infinity and NaN would spoil the logarithm; they are put right below. */
    vi odd_base = (a == 0.0f) | (a == KILN_INF) | (x != x);
    vi odd_exponent = (b == KILN_INF) | (y != y);
    vd_pair base = vd_from_vf(vf_select(odd_base, vf_set1(1.0f), a));
    vd_pair exponent = vd_from_vf(vf_select(odd_exponent, vf_set1(1.0f), y));
    vf r = vf_from_vd((vd_pair){vd_pow_positive(base.low, exponent.low), vd_pow_positive(base.high, exponent.high)});
    /* Integers: all from 2^23; odd ones: below 2^24 only. */
    vf whole = vf_select(b < 8388608.0f, vf_from_vi(vi_from_vf(vf_select(b < 8388608.0f, b, (vf){0}))), b);
    vi integer = whole == b;
    vi odd = integer & (b < 16777216.0f) & (-(vi_from_vf(vf_select(b < 16777216.0f, b, (vf){0})) & 1));
    vf zero = (vf){0}, inf = vf_set1(KILN_INF), one = vf_set1(1.0f);
    r = vf_select(a == 0.0f, vf_select(y < 0.0f, inf, zero), r);
    r = vf_select(a == KILN_INF, vf_select(y < 0.0f, zero, inf), r);
    vf grown = vf_select(a == 1.0f, one, vf_select((a > 1.0f) == (y > 0.0f), inf, zero));
    r = vf_select(b == KILN_INF, grown, r);
    vi negative = (vi)x < 0;
    r = vf_select(negative & odd, -r, r);
    r = vf_select((x < 0.0f) & (a != KILN_INF) & ~integer, vf_set1(KILN_NAN), r);
    r = vf_select((x != x) | (y != y), x + y, r);
    return vf_select((x == 1.0f) | (y == 0.0f), one, r);
}

KILN_SCALAR(exp)
KILN_SCALAR(expm1)
KILN_SCALAR(log)
KILN_SCALAR(log1p)
KILN_SCALAR(tanh)
KILN_SCALAR(sigmoid)
KILN_SCALAR(erf)
KILN_SCALAR(sin)
KILN_SCALAR(cos)
KILN_INLINE float sf_pow(float x, float y) { return vf_pow(vf_set1(x), vf_set1(y))[0]; }
#endif
#undef KILN_SCALAR

#endif
