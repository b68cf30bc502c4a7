#ifndef KILN_GROUPS
#define KILN_GROUPS
// Operands of the instructions that Hopper has for a group of four warps (`wgmma`).
//
// Operands lie in shared memory in rows of 128 bytes, 64 elements of 16 bits, whose 16-byte pieces are exchanged among eight rows: piece p of
// row r is at place p ^ r % 8. No two rows of a fragment are then in the same banks. Rows begin at multiples of 1024 bytes. Wider operands
// lie in blocks of 64 columns.

inline kiln_u32 kiln_address_in_shared(const void* at) { return (kiln_u32)__cvta_generic_to_shared(at); }

// How `wgmma` finds an operand: where it begins, 1024 bytes from eight rows to the next, and `apart` bytes from a block of 64 to the next.
inline kiln_u64 kiln_group_operand(kiln_u32 at, int apart)
{
    return (kiln_u64)(at >> 4 & 0x3fff) | (kiln_u64)(apart >> 4) << 16 | (kiln_u64)(1024 >> 4) << 32 | (kiln_u64)1 << 62;
}

// Before the first of some instructions: registers that they read or add to are written.
inline void kiln_group_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Behind the last of them.
inline void kiln_group_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
#endif
