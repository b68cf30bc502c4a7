// Philox4x32-10, with the layout that kiln_graph::philox states: the same bits on every target.

struct kiln_block4 { kiln_u32 word[4]; };

inline kiln_block4 kiln_philox(kiln_u64 seed, kiln_u64 stream, kiln_u64 block)
{
    kiln_u32 c0 = (kiln_u32)block, c1 = (kiln_u32)(block >> 32);
    kiln_u32 c2 = (kiln_u32)stream, c3 = (kiln_u32)(stream >> 32);
    kiln_u32 k0 = (kiln_u32)seed, k1 = (kiln_u32)(seed >> 32);
    for (int round = 0; round < 10; round++) {
        kiln_u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        kiln_u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return { c0, c1, c2, c3 };
}

// A number in [0, 1) of a word, a multiple of 2^-24.
inline float kiln_uniform(kiln_u32 word) { return (float)(word >> 8) * (1.0f / 16777216.0f); }
