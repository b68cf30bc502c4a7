// What kernels of images share. It stands in a namespace of the kernel's own, behind these names:
//   T, R        type of the elements in memory, and the type that they are computed in
//   widen, narrow   between T and R
//   Index       of elements: 64 bits where a tensor has more than 32 count; Count without a sign, which is faster to divide
//   THREADS     of a block

// Four neighbouring elements in memory, read and written together.
struct alignas(sizeof(T) * 4 < 16 ? sizeof(T) * 4 : 16) Four { T at[4]; };

// Four neighbouring elements in registers or shared memory.
struct alignas(16) Quad { R at[4]; };
