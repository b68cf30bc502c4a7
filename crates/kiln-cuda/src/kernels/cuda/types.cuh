// Types of elements, and their way to and from f32.
//
// NVRTC brings no headers, so the two types of 16 bits are declared here. A kernel computes in f32: an element is
// widened when it is loaded and rounded (to nearest, ties to even) when it is stored.
//
// KILN_HOST is defined where a C++ compiler of the host builds kernels, for tests: plain C++ stands beside what only a GPU has.

typedef unsigned short kiln_u16;
typedef unsigned int kiln_u32;
typedef unsigned long long kiln_u64;

struct kiln_f16 { kiln_u16 bits; };
struct kiln_bf16 { kiln_u16 bits; };

inline float kiln_widen(float x) { return x; }

inline float kiln_widen(kiln_bf16 x) { return __uint_as_float((kiln_u32)x.bits << 16); }

#ifdef KILN_HOST

inline float kiln_widen(kiln_f16 x)
{
    kiln_u32 sign = (kiln_u32)(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 0x3ff;
    // Subnormals are multiples of 2^-24; their sign is put on last.
    if (exponent == 0) return __uint_as_float(sign | __float_as_uint((float)fraction * (1.0f / 16777216.0f)));
    exponent = exponent == 31 ? 255 : exponent + 112;
    return __uint_as_float(sign | exponent << 23 | fraction << 13);
}

#else

inline float kiln_widen(kiln_f16 x)
{
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}

#endif

template <class T> T kiln_narrow(float x);

template <> inline float kiln_narrow<float>(float x) { return x; }

#ifdef KILN_HOST

// NaN becomes the one that a GPU makes.
template <> inline kiln_bf16 kiln_narrow<kiln_bf16>(float x)
{
    if (x != x) return { 0x7fff };
    kiln_u32 bits = __float_as_uint(x);
    return { (kiln_u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) };
}

template <> inline kiln_f16 kiln_narrow<kiln_f16>(float x)
{
    if (x != x) return { 0x7fff };
    kiln_u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    // 65520 and more round to infinity.
    if (bits >= 0x477ff000) return { (kiln_u16)(sign | 0x7c00) };
    // Below 2^-14 the result is a multiple of 2^-24: the sum with 0.5, whose last digit is 2^-24, rounds to one.
    if (bits < 0x38800000) return { (kiln_u16)(sign | (__float_as_uint(__uint_as_float(bits) + 0.5f) - 0x3f000000)) };
    bits += 0xfff + (bits >> 13 & 1);
    return { (kiln_u16)(sign | (bits - 0x38000000) >> 13) };
}

#else

// The instruction for two numbers has four times the rate of the one for a single number.
template <> inline kiln_bf16 kiln_narrow<kiln_bf16>(float x)
{
    kiln_u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(x));
    return { (kiln_u16)both };
}

template <> inline kiln_f16 kiln_narrow<kiln_f16>(float x)
{
    kiln_u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(x));
    return { (kiln_u16)both };
}

#endif

// Two elements of 16 bits in a register, the first one low.
#ifdef KILN_HOST

template <class T> kiln_u32 kiln_pack(float low, float high)
{
    return kiln_narrow<T>(low).bits | (kiln_u32)kiln_narrow<T>(high).bits << 16;
}

#else

template <class T> kiln_u32 kiln_pack(float low, float high);

template <> inline kiln_u32 kiln_pack<kiln_bf16>(float low, float high)
{
    kiln_u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

template <> inline kiln_u32 kiln_pack<kiln_f16>(float low, float high)
{
    kiln_u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

#endif

// The dynamic shared memory of a block, from a multiple of 16. The host brings its own.
#ifndef KILN_HOST
inline unsigned char* kiln_dynamic_shared()
{
    extern __shared__ uint4 kiln_shared[];
    return (unsigned char*)kiln_shared;
}

// Waits until `threads` threads of the block, whole warps, wait at barrier `number`.
inline void kiln_bar_sync(int number, int threads)
{
    asm volatile("bar.sync %0, %1;" :: "r"(number), "r"(threads) : "memory");
}
#endif

// N neighbouring elements, loaded and stored 16 bytes at a time. Their address is a multiple of 16.
template <class T, int N> union kiln_vector {
    uint4 words[N * sizeof(T) / 16];
    T at[N];

    __device__ kiln_vector() {}

    __device__ void load(const T* from)
    {
        for (int i = 0; i < N * sizeof(T) / 16; i++) words[i] = ((const uint4*)from)[i];
    }

    __device__ void store(T* to) const
    {
        for (int i = 0; i < N * sizeof(T) / 16; i++) ((uint4*)to)[i] = words[i];
    }
};
