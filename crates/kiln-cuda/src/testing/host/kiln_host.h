// Lets the host's C++ compiler build kernels that were written for CUDA, and runs them: for tests.
//
// Blocks run one after the other. The threads of a block are fibers: each has a stack of its own and runs until it ends or waits for others, at a
// barrier or where the lanes of a warp exchange values. A fiber that ends leaves its stack to the next one that starts, so a kernel without barriers runs
// its threads one after the other on one stack.
//
// Whoever waits lets others run, and who can go on does so before those behind it begin: groups of threads with a barrier of their own are as far apart as
// they can be.
//
// What a GPU leaves undefined is an error here: threads of a block that wait at different barriers, or at none, or meet one barrier with different numbers
// of threads; lanes of a warp that exchange values at different places; exchanges among a part of a warp. So are accesses to memory that is not there or not aligned, shifts by too much, sums of signed
// integers and casts of floats that are out of range, and divisions of integers by zero: the compiler makes them traps, and a trap ends the launch.

#pragma once

#define KILN_HOST 1

// C's functions alone: the overloads and the special functions of <cmath> take the compiler as long as a small kernel.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <utility>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
// Blocks run one after the other, so one block's memory serves all of them.
#define __shared__ static

// Vectors.

#define KILN_VECTORS(Name, Element)                                                                                       \
    struct Name##1 { Element x; };                                                                                        \
    struct alignas(2 * sizeof(Element)) Name##2 { Element x, y; };                                                        \
    struct Name##3 { Element x, y, z; };                                                                                  \
    struct alignas(4 * sizeof(Element) > 16 ? 16 : 4 * sizeof(Element)) Name##4 { Element x, y, z, w; };                   \
    inline Name##1 make_##Name##1(Element x) { return { x }; }                                                            \
    inline Name##2 make_##Name##2(Element x, Element y) { return { x, y }; }                                              \
    inline Name##3 make_##Name##3(Element x, Element y, Element z) { return { x, y, z }; }                                \
    inline Name##4 make_##Name##4(Element x, Element y, Element z, Element w) { return { x, y, z, w }; }

KILN_VECTORS(char, signed char)
KILN_VECTORS(uchar, unsigned char)
KILN_VECTORS(short, short)
KILN_VECTORS(ushort, unsigned short)
KILN_VECTORS(int, int)
KILN_VECTORS(uint, unsigned)
KILN_VECTORS(longlong, long long)
KILN_VECTORS(ulonglong, unsigned long long)
KILN_VECTORS(float, float)
KILN_VECTORS(double, double)
#undef KILN_VECTORS

// Shared memory that kernels declare lies in .bss, which is filled with noise before each block. What outlives a block lies in .data.
#define KILN_KEPT __attribute__((section(".data")))

// Where a thread is.

KILN_KEPT static uint3 threadIdx = {}, blockIdx = {}, blockDim = {}, gridDim = {};
static const int warpSize = 32;

namespace kiln_host {

// The most that CUDA allows in a block.
constexpr int MOST_THREADS = 1024;
constexpr int LANES = 32;
// What a kernel may have on its stack. Pages that nobody touches take no memory.
constexpr size_t STACK_BYTES = 256 * 1024;
// Bytes at the end of a stack, and on both sides of dynamic shared memory, that nobody may write.
constexpr size_t GUARD_BYTES = 256;
// What sm_90 gives to a block.
constexpr size_t MOST_SHARED_BYTES = 227 * 1024;
// NaN as f16 and as bf16; two of them as f32, four as f64.
constexpr unsigned short NOISE = 0xfff5;
// Barriers that a block has.
constexpr int BARRIERS = 16;

// A place in a source where threads wait for each other. `number` is another for each place, also on one line.
struct Site {
    int number;
    const char* file;
    int line;
};

enum class State : unsigned char { Fresh, Ready, Exchange, Barrier, Ended };

#if defined(__x86_64__)

using Context = void*;

// Saves what a call must preserve on this stack, keeps the stack's pointer in `*from`, and goes on where `to` was saved.
extern "C" __attribute__((visibility("hidden"))) void kiln_host_switch(Context* from, Context to);
asm(".text\n"
    ".p2align 4\n"
    ".hidden kiln_host_switch\n"
    ".globl kiln_host_switch\n"
    ".type kiln_host_switch,@function\n"
    "kiln_host_switch:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\n"
    "movq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\n"
    "ret\n"
    ".size kiln_host_switch,.-kiln_host_switch\n");

inline void switch_context(Context& from, Context& to) { kiln_host_switch(&from, to); }

inline void start_context(Context& context, unsigned char* stack, void (*entry)())
{
    // Six registers, where to return to, and a word that keeps the stack at eight from a multiple of sixteen, as behind a call.
    void** top = (void**)(stack + STACK_BYTES) - 8;
    for (int i = 0; i < 8; i++) top[i] = nullptr;
    top[6] = (void*)entry;
    context = top;
}

#else

using Context = ucontext_t;

inline void switch_context(Context& from, Context& to) { swapcontext(&from, &to); }

inline void start_context(Context& context, unsigned char* stack, void (*entry)())
{
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = STACK_BYTES;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}

#endif

struct Fiber {
    Context context;
    unsigned char* stack;
    Site site;
    // Which of two sets of slots the lane exchanges values through next: a lane is never two exchanges ahead of another.
    unsigned char parity;
    State state;
    // Which barrier it waits at, if it waits at one.
    unsigned char barrier;
};

// Who waits at a barrier: so many threads, until there are `threads`.
struct Barrier {
    int waiting, threads;
};

// A launch.
struct Launch {
    const char* kernel;
    void (*call)(void**);
    void** arguments;
    int threads;
    // Whether the last thread runs first.
    bool backward;
    bool failed;
    char* message;
    size_t capacity;
};

KILN_KEPT static Launch launch;
KILN_KEPT static Fiber* fibers;
KILN_KEPT static Barrier barriers[BARRIERS] = {};
KILN_KEPT static int current;
KILN_KEPT static Context scheduler;
KILN_KEPT static unsigned long long (*slots)[MOST_THREADS];
KILN_KEPT static unsigned char* stacks;
// Stacks that no fiber has, the one used last on top.
KILN_KEPT static unsigned char** free_stacks;
KILN_KEPT static int free_count;
KILN_KEPT static unsigned char* dynamic_shared;

// Where .bss begins and ends: the linker says.
extern "C" __attribute__((visibility("hidden"))) unsigned char __bss_start[], _end[];

inline void fill(unsigned char* memory, size_t bytes)
{
    unsigned long long words = NOISE * 0x0001000100010001ull;
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) memcpy(memory + i, &words, 8);
    for (; i < bytes; i++) memory[i] = (unsigned char)(NOISE >> (8 * (i % 2)));
}

inline bool untouched(const unsigned char* memory, size_t bytes)
{
    unsigned long long words = NOISE * 0x0001000100010001ull, differences = 0;
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) {
        unsigned long long there;
        memcpy(&there, memory + i, 8);
        differences |= there ^ words;
    }
    for (; i < bytes; i++) differences |= memory[i] ^ (unsigned char)(NOISE >> (8 * (i % 2)));
    return differences == 0;
}

// Keeps the first failure of a launch.
__attribute__((format(printf, 1, 2))) inline void report(const char* format, ...)
{
    if (launch.failed) return;
    launch.failed = true;
    int length = snprintf(launch.message, launch.capacity, "kernel %s, block (%u, %u, %u): ", launch.kernel, blockIdx.x,
        blockIdx.y, blockIdx.z);
    if (length < 0 || (size_t)length >= launch.capacity) return;
    va_list values;
    va_start(values, format);
    vsnprintf(launch.message + length, launch.capacity - length, format, values);
    va_end(values);
}

inline void yield() { switch_context(fibers[current].context, scheduler); }

__attribute__((noinline)) static void wait(State state, Site site)
{
    fibers[current].site = site;
    fibers[current].state = state;
    yield();
}

// Ends the launch; the fibers are abandoned.
[[noreturn]] static void stop()
{
    fibers[current].state = State::Ended;
    for (;;) yield();
}

// Waits until `threads` threads wait at barrier `number`.
inline void barrier(Site site, int number, int threads)
{
    Barrier& met = barriers[number];
    if (met.waiting && met.threads != threads) {
        report("thread %d waits for %d threads at barrier %d, where others wait for %d, at %s:%d", current, threads, number,
            met.threads, site.file, site.line);
        stop();
    }
    met = { met.waiting + 1, threads };
    fibers[current].barrier = (unsigned char)number;
    wait(State::Barrier, site);
}

// Gives `bits` to the other lanes of the warp; what all of them gave.
inline const unsigned long long* exchange(Site site, unsigned mask, unsigned long long bits)
{
    if (mask != 0xffffffffu) {
        report("thread %d exchanges values among a part of its warp (mask %#x) at %s:%d", current, mask, site.file, site.line);
        stop();
    }
    unsigned parity = fibers[current].parity ^= 1;
    slots[parity][current] = bits;
    wait(State::Exchange, site);
    return &slots[parity][current & ~(LANES - 1)];
}

// Types that CUDA shuffles.
template <class T> struct Shuffled { static constexpr bool allowed = false; };
#define KILN_SHUFFLED(T) template <> struct Shuffled<T> { static constexpr bool allowed = true; };
KILN_SHUFFLED(int)
KILN_SHUFFLED(unsigned)
KILN_SHUFFLED(long)
KILN_SHUFFLED(unsigned long)
KILN_SHUFFLED(long long)
KILN_SHUFFLED(unsigned long long)
KILN_SHUFFLED(float)
KILN_SHUFFLED(double)
#undef KILN_SHUFFLED

// The value of lane `source(lane, first, width)`; `first` is the first lane of the group of `width` lanes.
template <class T, class Source> T shuffle(Site site, unsigned mask, T value, int width, Source source)
{
    static_assert(Shuffled<T>::allowed, "CUDA shuffles int, unsigned, long, long long, float and double");
    unsigned long long bits = 0;
    memcpy(&bits, &value, sizeof(T));
    const unsigned long long* given = exchange(site, mask, bits);
    int lane = current % LANES;
    T result;
    memcpy(&result, &given[source(lane, lane & ~(width - 1), width)], sizeof(T));
    return result;
}

template <class T> T shfl(Site site, unsigned mask, T value, int from, int width = LANES)
{
    return shuffle(site, mask, value, width, [=](int, int first, int group) { return first + (from & (group - 1)); });
}

template <class T> T shfl_up(Site site, unsigned mask, T value, unsigned by, int width = LANES)
{
    return shuffle(site, mask, value, width,
        [=](int lane, int first, int) { return lane - (int)by < first ? lane : lane - (int)by; });
}

template <class T> T shfl_down(Site site, unsigned mask, T value, unsigned by, int width = LANES)
{
    return shuffle(site, mask, value, width,
        [=](int lane, int first, int group) { return lane + (int)by >= first + group ? lane : lane + (int)by; });
}

template <class T> T shfl_xor(Site site, unsigned mask, T value, int by, int width = LANES)
{
    return shuffle(site, mask, value, width,
        [=](int lane, int first, int group) { return (lane ^ by) >= first + group ? lane : lane ^ by; });
}

inline unsigned ballot(Site site, unsigned mask, int predicate)
{
    const unsigned long long* given = exchange(site, mask, predicate != 0);
    unsigned bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= (unsigned)given[lane] << lane;
    return bits;
}

} // namespace kiln_host

#define KILN_SITE kiln_host::Site{__COUNTER__, __FILE__, __LINE__}
#define __syncthreads() kiln_host::barrier(KILN_SITE, 0, kiln_host::launch.threads)
// `bar.sync` in the assembly of a GPU.
#define kiln_bar_sync(number, threads) kiln_host::barrier(KILN_SITE, number, threads)
#define __syncwarp(...) (void)kiln_host::exchange(KILN_SITE, 0xffffffffu, 0)
#define __shfl_sync(...) kiln_host::shfl(KILN_SITE, __VA_ARGS__)
#define __shfl_up_sync(...) kiln_host::shfl_up(KILN_SITE, __VA_ARGS__)
#define __shfl_down_sync(...) kiln_host::shfl_down(KILN_SITE, __VA_ARGS__)
#define __shfl_xor_sync(...) kiln_host::shfl_xor(KILN_SITE, __VA_ARGS__)
#define __ballot_sync(mask, predicate) kiln_host::ballot(KILN_SITE, mask, predicate)
#define __any_sync(mask, predicate) (kiln_host::ballot(KILN_SITE, mask, predicate) != 0)
#define __all_sync(mask, predicate) (kiln_host::ballot(KILN_SITE, mask, predicate) == 0xffffffffu)
#define __threadfence() ((void)0)
#define __threadfence_block() ((void)0)

// Numbers.

template <class To, class From> inline To kiln_bits_as(From from)
{
    static_assert(sizeof(To) == sizeof(From), "another size");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

// Products that no sum is joined with. Host code is built without such joins.
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __uint_as_float(unsigned x) { return kiln_bits_as<float>(x); }
inline float __int_as_float(int x) { return kiln_bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return kiln_bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return kiln_bits_as<int>(x); }
inline double __longlong_as_double(long long x) { return kiln_bits_as<double>(x); }
inline long long __double_as_longlong(double x) { return kiln_bits_as<long long>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
template <class T> inline T __ldg(const T* from) { return *from; }

inline float rsqrtf(float x) { return (float)(1.0 / sqrt((double)x)); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }

#define KILN_EXTREMES(T)                                                                                                  \
    inline T min(T a, T b) { return b < a ? b : a; }                                                                      \
    inline T max(T a, T b) { return a < b ? b : a; }
KILN_EXTREMES(int)
KILN_EXTREMES(unsigned)
KILN_EXTREMES(long)
KILN_EXTREMES(unsigned long)
KILN_EXTREMES(long long)
KILN_EXTREMES(unsigned long long)
#undef KILN_EXTREMES
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

// Atomics on integers alone: sums of floats in no order would differ from run to run.
#define KILN_ATOMIC(T)                                                                                                    \
    inline T atomicAdd(T* at, T x) { T old = *at; *at = old + x; return old; }                                            \
    inline T atomicMin(T* at, T x) { T old = *at; *at = x < old ? x : old; return old; }                                  \
    inline T atomicMax(T* at, T x) { T old = *at; *at = old < x ? x : old; return old; }                                  \
    inline T atomicOr(T* at, T x) { T old = *at; *at = old | x; return old; }                                             \
    inline T atomicAnd(T* at, T x) { T old = *at; *at = old & x; return old; }                                            \
    inline T atomicExch(T* at, T x) { T old = *at; *at = x; return old; }                                                 \
    inline T atomicCAS(T* at, T expected, T x) { T old = *at; *at = old == expected ? x : old; return old; }
KILN_ATOMIC(int)
KILN_ATOMIC(unsigned)
KILN_ATOMIC(unsigned long long)
#undef KILN_ATOMIC

// Running.

namespace kiln_host {

inline void enter()
{
    launch.call(launch.arguments);
    fibers[current].state = State::Ended;
    for (;;) yield();
}

// Calls a kernel with pointers of the types that it declares.
template <class... P, size_t... I> void call_with(void (*kernel)(P...), void** arguments, std::index_sequence<I...>)
{
    kernel((P)arguments[I]...);
}

template <class... P> void call(void (*kernel)(P...), void** arguments)
{
    call_with(kernel, arguments, std::index_sequence_for<P...>());
}

// Runs thread `number` until it waits or ends.
inline void resume(int number)
{
    Fiber& fiber = fibers[number];
    if (fiber.state == State::Fresh) {
        fiber.stack = free_stacks[--free_count];
        start_context(fiber.context, fiber.stack, enter);
    }
    fiber.state = State::Ready;
    current = number;
    threadIdx.x = (unsigned)number;
    switch_context(scheduler, fiber.context);
    if (fiber.state == State::Ended) {
        if (!untouched(fiber.stack, GUARD_BYTES)) report("thread %d takes more than %zu bytes of stack", number, STACK_BYTES);
        free_stacks[free_count++] = fiber.stack;
    }
}

inline bool waits_alike(const Fiber& a, const Fiber& b)
{
    return a.state == b.state && (a.state == State::Ended || a.site.number == b.site.number);
}

// Runs the lanes of a warp until none can go on. Returns whether any could.
inline bool run_warp(int warp)
{
    Fiber* lanes = fibers + warp * LANES;
    bool moved = false;
    for (;;) {
        for (int i = 0; i < LANES && !launch.failed; i++) {
            int lane = launch.backward ? LANES - 1 - i : i;
            if (lanes[lane].state != State::Fresh && lanes[lane].state != State::Ready) continue;
            resume(warp * LANES + lane);
            moved = true;
        }
        bool exchanged = lanes[0].state == State::Exchange;
        for (int lane = 1; lane < LANES; lane++) exchanged = exchanged && waits_alike(lanes[0], lanes[lane]);
        if (!exchanged || launch.failed) return moved;
        for (int lane = 0; lane < LANES; lane++) lanes[lane].state = State::Ready;
    }
}

// What a thread does, for the message about threads that disagree.
inline void describe(char (&text)[256], const Fiber& fiber)
{
    const char* doing = fiber.state == State::Exchange ? "exchanges values in its warp"
        : fiber.barrier                                ? "waits for its group"
                                                       : "waits for the block";
    if (fiber.state == State::Ended) snprintf(text, sizeof(text), "has ended");
    else snprintf(text, sizeof(text), "%s at %s:%d", doing, fiber.site.file, fiber.site.line);
}

inline void report_disagreement()
{
    // An exchange waits for its warp alone: the first two that differ in a warp say more than two of different warps.
    int one = 0, other = 0;
    for (int i = 0; i < launch.threads && !other; i++)
        if (fibers[i].state == State::Exchange)
            for (int j = i & ~(LANES - 1); j < (i | (LANES - 1)) + 1 && !other; j++)
                if (!waits_alike(fibers[i], fibers[j])) one = i, other = j;
    for (int i = 1; i < launch.threads && !other && !one; i++)
        if (!waits_alike(fibers[0], fibers[i])) other = i;
    char first[256], second[256];
    describe(first, fibers[one]);
    describe(second, fibers[other]);
    report("threads disagree: thread %d %s, thread %d %s", one, first, other, second);
}

// Lets go on who waits where the first lane of `warp` waits, if all are there. Returns whether they go on.
inline bool release(int warp)
{
    const Fiber first = fibers[warp * LANES];
    if (first.state != State::Barrier) return false;
    Barrier& met = barriers[first.barrier];
    if (met.waiting < met.threads) return false;
    auto waits_here = [&](const Fiber& fiber) { return fiber.state == State::Barrier && fiber.barrier == first.barrier; };
    for (int i = 0; i < launch.threads; i++)
        if (waits_here(fibers[i]) && !waits_alike(first, fibers[i])) return false;
    for (int i = 0; i < launch.threads; i++)
        if (waits_here(fibers[i])) fibers[i].state = State::Ready;
    met.waiting = 0;
    return true;
}

// Runs all threads of a block to their end.
inline void run_block()
{
    free_count = 0;
    while (free_count < MOST_THREADS) {
        free_stacks[free_count] = stacks + (size_t)free_count * STACK_BYTES;
        free_count++;
    }
    for (int i = 0; i < launch.threads; i++) {
        fibers[i].state = State::Fresh;
        fibers[i].parity = 0;
    }
    for (Barrier& barrier : barriers) barrier = {};
    int warps = launch.threads / LANES;
    while (!launch.failed) {
        bool moved = false, released = false;
        for (int i = 0; i < warps && !launch.failed && !released; i++) {
            int warp = launch.backward ? warps - 1 - i : i;
            moved |= run_warp(warp);
            released = release(warp);
        }
        if (launch.failed || released) continue;
        bool ended = true;
        for (int i = 0; i < launch.threads; i++) ended = ended && fibers[i].state == State::Ended;
        if (ended) return;
        if (!moved) report_disagreement();
    }
}

// Memory of the runner, once for each library.
inline bool prepare()
{
    if (stacks) return true;
    auto map = [](size_t bytes) -> unsigned char* {
        void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        return memory == MAP_FAILED ? nullptr : (unsigned char*)memory;
    };
    fibers = (Fiber*)map(MOST_THREADS * sizeof(Fiber));
    slots = (unsigned long long (*)[MOST_THREADS])map(2 * sizeof(*slots));
    free_stacks = (unsigned char**)map(MOST_THREADS * sizeof(*free_stacks));
    dynamic_shared = map(MOST_SHARED_BYTES + 2 * GUARD_BYTES);
    stacks = map(MOST_THREADS * STACK_BYTES);
    if (!fibers || !slots || !free_stacks || !dynamic_shared || !stacks) return false;
    for (int i = 0; i < MOST_THREADS; i++) fill(stacks + (size_t)i * STACK_BYTES, GUARD_BYTES);
    return true;
}

inline void run_grid(const unsigned (&grid)[3], size_t shared_bytes)
{
    unsigned long long blocks = (unsigned long long)grid[0] * grid[1] * grid[2];
    for (unsigned long long i = 0; i < blocks && !launch.failed; i++) {
        unsigned long long block = launch.backward ? blocks - 1 - i : i;
        blockIdx = { (unsigned)(block % grid[0]), (unsigned)(block / grid[0] % grid[1]), (unsigned)(block / grid[0] / grid[1]) };
        fill(__bss_start, (size_t)(_end - __bss_start));
        fill(dynamic_shared, shared_bytes + 2 * GUARD_BYTES);
        run_block();
        if (!untouched(dynamic_shared, GUARD_BYTES) || !untouched(dynamic_shared + GUARD_BYTES + shared_bytes, GUARD_BYTES))
            report("it writes outside of the %zu bytes of dynamic shared memory that it has", shared_bytes);
    }
}

// What a kernel did to get a signal.
inline const char* crime(int signal)
{
    switch (signal) {
    case SIGSEGV:
    case SIGBUS: return "touches memory that is not there";
    case SIGFPE: return "divides an integer by zero";
    default: return "does what C++ leaves undefined: an access that is not aligned, or an integer that is out of range";
    }
}

constexpr int SIGNALS[] = { SIGSEGV, SIGBUS, SIGFPE, SIGILL };
constexpr int SIGNAL_COUNT = 4;

KILN_KEPT static struct sigaction earlier[SIGNAL_COUNT] = {};
KILN_KEPT static pthread_t runner = {};
KILN_KEPT static jmp_buf caught = {};

// Ends the launch; a signal in another thread of the program goes to whom it went before.
inline void handle(int signal)
{
    if (!pthread_equal(pthread_self(), runner)) {
        for (int i = 0; i < SIGNAL_COUNT; i++)
            if (SIGNALS[i] == signal) sigaction(signal, &earlier[i], nullptr);
        return;
    }
    report("thread %d %s", current, crime(signal));
    _longjmp(caught, 1);
}

// Runs all blocks, and ends at the first signal.
inline void run_caught(const unsigned (&grid)[3], size_t shared_bytes)
{
    struct sigaction action = {};
    action.sa_handler = handle;
    action.sa_flags = SA_ONSTACK | SA_NODEFER;
    runner = pthread_self();
    for (int i = 0; i < SIGNAL_COUNT; i++) sigaction(SIGNALS[i], &action, &earlier[i]);
    if (_setjmp(caught) == 0) run_grid(grid, shared_bytes);
    for (int i = 0; i < SIGNAL_COUNT; i++) sigaction(SIGNALS[i], &earlier[i], nullptr);
}

// A kernel of the library.
struct Kernel {
    const char* name;
    void (*call)(void**);
};

} // namespace kiln_host

static inline unsigned char* kiln_dynamic_shared() { return kiln_host::dynamic_shared + kiln_host::GUARD_BYTES; }

// The library's kernels; defined behind them.
extern "C" const kiln_host::Kernel kiln_host_kernels[];

// Runs a launch. Returns 0, or 1 with a message.
extern "C" __attribute__((visibility("default"))) int kiln_host_launch(size_t kernel, const unsigned* grid, unsigned threads, size_t shared_bytes, void** arguments,
    int backward, char* message, size_t capacity)
{
    using namespace kiln_host;
    const Kernel& found = kiln_host_kernels[kernel];
    launch = { found.name, found.call, arguments, (int)threads, backward != 0, false, message, capacity };
    blockIdx = { 0, 0, 0 };
    blockDim = { threads, 1, 1 };
    gridDim = { grid[0], grid[1], grid[2] };
    if (!prepare()) report("the host has no memory for its threads");
    else if (threads == 0 || threads % LANES || threads > MOST_THREADS) report("it has %u threads in a block", threads);
    else if (shared_bytes > MOST_SHARED_BYTES) report("it asks for %zu bytes of shared memory", shared_bytes);
    else if (grid[0] == 0 || grid[1] == 0 || grid[2] == 0) report("its grid is empty");
    else if (grid[1] > 65535 || grid[2] > 65535 || grid[0] > 0x7fffffffu) report("its grid is too large");
    else run_caught({ grid[0], grid[1], grid[2] }, shared_bytes);
    return launch.failed;
}
