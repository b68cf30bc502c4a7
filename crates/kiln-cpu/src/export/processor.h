/* The instructions that a step was compiled with and the processor lacks: those that the compiler defines a macro for and may use by itself, or in an
 * operation of the program's own. Compiled for any processor. Elsewhere than on x86-64 nothing is looked at.
 */
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#define ANY_PROCESSOR __attribute__((noinline, target("arch=x86-64")))

enum { EAX, EBX, ECX, EDX };

/* A bit of the answer to cpuid. Compilers know too few of the names: Clang 14 has neither F16C nor AVX512-FP16. */
ANY_PROCESSOR static int has(unsigned leaf, unsigned part, int of, int bit) {
    unsigned most, answer[4], ignored[3];
    __cpuid(leaf & 0x80000000u, most, ignored[0], ignored[1], ignored[2]);
    if (most < leaf) return 0;
    __cpuid_count(leaf, part, answer[EAX], answer[EBX], answer[ECX], answer[EDX]);
    return answer[of] >> bit & 1;
}

#define NEEDED(name, found) if (!(found)) strcat(strcat(missing, " "), name);
/* Appends the names to `missing`, of at least 1024 bytes. */
ANY_PROCESSOR static void missing_features(char *missing) {
    (void)missing, (void)has;
    /* Of these the system must keep the registers, too. */
    __builtin_cpu_init();
#ifdef __AVX__
    NEEDED("avx", __builtin_cpu_supports("avx"))
#endif
#ifdef __AVX2__
    NEEDED("avx2", __builtin_cpu_supports("avx2"))
#endif
#ifdef __FMA__
    NEEDED("fma", __builtin_cpu_supports("fma"))
#endif
#ifdef __AVX512F__
    NEEDED("avx512f", __builtin_cpu_supports("avx512f"))
#endif
#ifdef __SSE3__
    NEEDED("sse3", has(1, 0, ECX, 0))
#endif
#ifdef __PCLMUL__
    NEEDED("pclmul", has(1, 0, ECX, 1))
#endif
#ifdef __SSSE3__
    NEEDED("ssse3", has(1, 0, ECX, 9))
#endif
#ifdef __SSE4_1__
    NEEDED("sse4.1", has(1, 0, ECX, 19))
#endif
#ifdef __SSE4_2__
    NEEDED("sse4.2", has(1, 0, ECX, 20))
#endif
#ifdef __MOVBE__
    NEEDED("movbe", has(1, 0, ECX, 22))
#endif
#ifdef __POPCNT__
    NEEDED("popcnt", has(1, 0, ECX, 23))
#endif
#ifdef __AES__
    NEEDED("aes", has(1, 0, ECX, 25))
#endif
#ifdef __F16C__
    NEEDED("f16c", has(1, 0, ECX, 29))
#endif
#ifdef __LZCNT__
    NEEDED("lzcnt", has(0x80000001u, 0, ECX, 5))
#endif
#ifdef __SSE4A__
    NEEDED("sse4a", has(0x80000001u, 0, ECX, 6))
#endif
#ifdef __XOP__
    NEEDED("xop", has(0x80000001u, 0, ECX, 11))
#endif
#ifdef __FMA4__
    NEEDED("fma4", has(0x80000001u, 0, ECX, 16))
#endif
#ifdef __TBM__
    NEEDED("tbm", has(0x80000001u, 0, ECX, 21))
#endif
#ifdef __BMI__
    NEEDED("bmi", has(7, 0, EBX, 3))
#endif
#ifdef __BMI2__
    NEEDED("bmi2", has(7, 0, EBX, 8))
#endif
#ifdef __AVX512DQ__
    NEEDED("avx512dq", has(7, 0, EBX, 17))
#endif
#ifdef __ADX__
    NEEDED("adx", has(7, 0, EBX, 19))
#endif
#ifdef __AVX512IFMA__
    NEEDED("avx512ifma", has(7, 0, EBX, 21))
#endif
#ifdef __AVX512PF__
    NEEDED("avx512pf", has(7, 0, EBX, 26))
#endif
#ifdef __AVX512ER__
    NEEDED("avx512er", has(7, 0, EBX, 27))
#endif
#ifdef __AVX512CD__
    NEEDED("avx512cd", has(7, 0, EBX, 28))
#endif
#ifdef __SHA__
    NEEDED("sha", has(7, 0, EBX, 29))
#endif
#ifdef __AVX512BW__
    NEEDED("avx512bw", has(7, 0, EBX, 30))
#endif
#ifdef __AVX512VL__
    NEEDED("avx512vl", has(7, 0, EBX, 31))
#endif
#ifdef __AVX512VBMI__
    NEEDED("avx512vbmi", has(7, 0, ECX, 1))
#endif
#ifdef __AVX512VBMI2__
    NEEDED("avx512vbmi2", has(7, 0, ECX, 6))
#endif
#ifdef __GFNI__
    NEEDED("gfni", has(7, 0, ECX, 8))
#endif
#ifdef __VAES__
    NEEDED("vaes", has(7, 0, ECX, 9))
#endif
#ifdef __VPCLMULQDQ__
    NEEDED("vpclmulqdq", has(7, 0, ECX, 10))
#endif
#ifdef __AVX512VNNI__
    NEEDED("avx512vnni", has(7, 0, ECX, 11))
#endif
#ifdef __AVX512BITALG__
    NEEDED("avx512bitalg", has(7, 0, ECX, 12))
#endif
#ifdef __AVX512VPOPCNTDQ__
    NEEDED("avx512vpopcntdq", has(7, 0, ECX, 14))
#endif
#ifdef __AVX5124VNNIW__
    NEEDED("avx5124vnniw", has(7, 0, EDX, 2))
#endif
#ifdef __AVX5124FMAPS__
    NEEDED("avx5124fmaps", has(7, 0, EDX, 3))
#endif
#ifdef __AVX512VP2INTERSECT__
    NEEDED("avx512vp2intersect", has(7, 0, EDX, 8))
#endif
#ifdef __AVX512FP16__
    NEEDED("avx512fp16", has(7, 0, EDX, 23))
#endif
#ifdef __SHA512__
    NEEDED("sha512", has(7, 1, EAX, 0))
#endif
#ifdef __SM3__
    NEEDED("sm3", has(7, 1, EAX, 1))
#endif
#ifdef __SM4__
    NEEDED("sm4", has(7, 1, EAX, 2))
#endif
#ifdef __AVXVNNI__
    NEEDED("avxvnni", has(7, 1, EAX, 4))
#endif
#ifdef __AVX512BF16__
    NEEDED("avx512bf16", has(7, 1, EAX, 5))
#endif
#ifdef __AVXIFMA__
    NEEDED("avxifma", has(7, 1, EAX, 23))
#endif
#ifdef __AVXVNNIINT8__
    NEEDED("avxvnniint8", has(7, 1, EDX, 4))
#endif
#ifdef __AVXNECONVERT__
    NEEDED("avxneconvert", has(7, 1, EDX, 5))
#endif
#ifdef __AVXVNNIINT16__
    NEEDED("avxvnniint16", has(7, 1, EDX, 10))
#endif
#ifdef __AVX10_1__
    NEEDED("avx10.1", has(7, 1, EDX, 19))
#endif
#ifdef __APX_F__
    NEEDED("apx", has(7, 1, EDX, 21))
#endif
}
#else
#define ANY_PROCESSOR
static void missing_features(char *missing) { (void)missing; }
#endif
