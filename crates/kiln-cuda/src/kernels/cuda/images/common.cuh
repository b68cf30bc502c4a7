// What kernels of images share. It stands in a namespace of the kernel's own, behind these names:
//   T, O, R     types of the elements that are read, of the results in memory, and of what is computed in between
//   widen, narrow   from T to R, from R to O
//   Index       of elements: 64 bits where a tensor has more than 32 count; Count without a sign, which is faster to divide
//   THREADS     of a block

// Four neighbouring elements in memory, read and written together.
struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) Four { T at[4]; };

// Four neighbouring results in memory.
struct alignas(sizeof(O) * 4 < 16 ? sizeof(O) * 4 : 16) FourResults { O at[4]; };

// Four neighbouring elements in registers or shared memory.
struct alignas(16) Quad { R at[4]; };
