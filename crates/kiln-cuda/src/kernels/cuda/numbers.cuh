#ifndef KILN_NUMBERS
#define KILN_NUMBERS
// Numbers of a template: what stands for a literal of a kernel that steps of several shapes share.
//
// The kernel NAME has one more parameter, NAME_numbers, by value. A number is an object without a state: where C++
// wants its value it reads the parameter, wherever in the kernel's functions that is. A function that is not inlined
// into its kernel cannot, and does not compile.
//
// A divisor comes with what multiplies by its reciprocal: Granlund and Montgomery, "Division by Invariant Integers
// using Multiplication", figure 4.1, which is exact for every n and every divisor of 32 bits.
#ifdef KILN_HOST
// One launch runs at a time, on one thread of the host.
#define KILN_NUMBERS_OF(NAME, WORDS)                    \
    struct NAME##_numbers { kiln_u64 word[WORDS]; };    \
    static const NAME##_numbers* NAME##_here;
#define KILN_PARAMETER(NAME) const NAME##_numbers* kiln_numbers
#define KILN_ENTER(NAME) NAME##_here = kiln_numbers;
#define KILN_LOAD(T, FORM, REGISTER, NAME, PARAMETER, BYTE, x) \
    memcpy(&x, (const char*)NAME##_here->word + BYTE, sizeof(T));
#define KILN_INLINED inline
#else
#define KILN_NUMBERS_OF(NAME, WORDS) struct NAME##_numbers { kiln_u64 word[WORDS]; };
#define KILN_PARAMETER(NAME) const NAME##_numbers kiln_numbers
#define KILN_ENTER(NAME)
#define KILN_LOAD(T, FORM, REGISTER, NAME, PARAMETER, BYTE, x) \
    asm("ld.param." FORM " %0, [" #NAME "_param_" #PARAMETER "+" #BYTE "];" : "=" REGISTER(x));
#define KILN_INLINED __forceinline__
#endif

#define KILN_NUMBER(NUMBER, T, FORM, REGISTER, NAME, PARAMETER, BYTE)   \
    struct NUMBER {                                                     \
        typedef T type;                                                 \
        constexpr NUMBER() {}                                           \
        KILN_INLINED operator T() const                                 \
        {                                                               \
            T x;                                                        \
            KILN_LOAD(T, FORM, REGISTER, NAME, PARAMETER, BYTE, x)      \
            return x;                                                   \
        }                                                               \
    };

// T has 32 bits; MULTIPLIER, FIRST and SECOND are bytes of the parameter as BYTE is.
#define KILN_DIVISOR(NUMBER, T, NAME, PARAMETER, BYTE, MULTIPLIER, FIRST, SECOND)           \
    struct NUMBER {                                                                         \
        typedef T type;                                                                     \
        typedef void kiln_is_divisor;                                                       \
        constexpr NUMBER() {}                                                               \
        KILN_INLINED operator T() const                                                     \
        {                                                                                   \
            T x;                                                                            \
            KILN_LOAD(T, "b32", "r", NAME, PARAMETER, BYTE, x)                              \
            return x;                                                                       \
        }                                                                                   \
        KILN_INLINED kiln_u32 quotient(kiln_u32 n) const                                    \
        {                                                                                   \
            kiln_u32 multiplier, first, second;                                             \
            KILN_LOAD(kiln_u32, "b32", "r", NAME, PARAMETER, MULTIPLIER, multiplier)        \
            KILN_LOAD(kiln_u32, "b32", "r", NAME, PARAMETER, FIRST, first)                  \
            KILN_LOAD(kiln_u32, "b32", "r", NAME, PARAMETER, SECOND, second)                \
            const kiln_u32 high = (kiln_u32)((kiln_u64)n * multiplier >> 32);               \
            return (high + ((n - high) >> first)) >> second;                                \
        }                                                                                   \
    };

// A number N as a constant of another type.
template <class T, class N> struct kiln_as {
    typedef T type;
    constexpr kiln_as() {}
    KILN_INLINED operator T() const { return (T)(typename N::type)N(); }
};
template <class T, class N> struct kiln_as_divisor : kiln_as<T, N> {
    typedef void kiln_is_divisor;
    constexpr kiln_as_divisor() {}
    KILN_INLINED kiln_u32 quotient(kiln_u32 n) const { return N().quotient(n); }
};
template <class N> struct kiln_as<int, N> : kiln_as_divisor<const int, N> { constexpr kiln_as() {} };
template <class N> struct kiln_as<unsigned, N> : kiln_as_divisor<const unsigned, N> { constexpr kiln_as() {} };

template <class T, class N> KILN_INLINED auto kiln_over(T n, N d) { return n / (typename N::type)d; }
template <class N> KILN_INLINED kiln_u32 kiln_over(kiln_u32 n, N d) { return d.quotient(n); }
template <class T, class N> KILN_INLINED auto kiln_rest(T n, N d) { return n % (typename N::type)d; }
template <class N> KILN_INLINED kiln_u32 kiln_rest(kiln_u32 n, N d)
{
    return n - d.quotient(n) * (kiln_u32)(typename N::type)d;
}
template <class T, class N, class = typename N::kiln_is_divisor> KILN_INLINED auto operator/(T n, N d)
{
    return kiln_over(n, d);
}
template <class T, class N, class = typename N::kiln_is_divisor> KILN_INLINED auto operator%(T n, N d)
{
    return kiln_rest(n, d);
}
#endif
