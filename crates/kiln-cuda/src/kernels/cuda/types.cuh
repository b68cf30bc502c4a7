// Types of elements, and their way to and from f32.
//
// NVRTC brings no headers, so the two types of 16 bits are declared here. A kernel computes in f32: an element is
// widened when it is loaded and rounded (to nearest, ties to even) when it is stored.

typedef unsigned short kiln_u16;
typedef unsigned int kiln_u32;
typedef unsigned long long kiln_u64;

struct kiln_f16 { kiln_u16 bits; };
struct kiln_bf16 { kiln_u16 bits; };

inline float kiln_widen(float x) { return x; }

inline float kiln_widen(kiln_bf16 x) { return __uint_as_float((kiln_u32)x.bits << 16); }

inline float kiln_widen(kiln_f16 x)
{
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
    return wide;
}

template <class T> T kiln_narrow(float x);

template <> inline float kiln_narrow<float>(float x) { return x; }

template <> inline kiln_bf16 kiln_narrow<kiln_bf16>(float x)
{
    kiln_bf16 narrow;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
    return narrow;
}

template <> inline kiln_f16 kiln_narrow<kiln_f16>(float x)
{
    kiln_f16 narrow;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(narrow.bits) : "f"(x));
    return narrow;
}

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
