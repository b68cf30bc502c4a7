// What is between a product of query and key and its weight: scale, masks, dropout.

// Operands of an attention. Of what C does not have the members are not read.
template <class C> struct kiln_attention_operands {
    const typename C::stored* query;
    const typename C::stored* key;
    const typename C::stored* value;
    const typename C::mask_type* mask;
    const unsigned char* hidden;
    // For each tile of scores whether keys are hidden there (kiln_attention_map).
    const int* map;
    typename C::real scale, fill, keep, factor;
    kiln_u64 seed, stream;
};

// Extents and states of a tile of the mask.
enum { KILN_ATTENTION_OPEN, KILN_ATTENTION_MIXED, KILN_ATTENTION_HIDDEN };

template <class R> R kiln_attention_infinity() { return (R)__uint_as_float(0x7f800000u); }

inline float kiln_attention_exp(float x) { return exp2f(x * 1.44269504088896341f); }
inline double kiln_attention_exp(double x) { return exp(x); }

// Distances below the largest score from which on weights are zero.
inline float kiln_attention_reach(float) { return 104; }
inline double kiln_attention_reach(double) { return 746; }

template <class R> R kiln_attention_larger(R a, R b) { return a > b ? a : b; }

// Whether any thread of the block says so.
inline bool kiln_attention_any(bool mine)
{
    __shared__ int any;
    __syncthreads();
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    if (mine) any = 1;
    __syncthreads();
    return any;
}

// Bit j says whether dropout keeps number `first + j` of all scores, for N neighbours. Where rows begin at multiples of
// what a block of Philox holds, `first` is one.
template <class C, int N> unsigned kiln_attention_kept(const kiln_attention_operands<C>& o, kiln_u64 first)
{
    constexpr bool WIDE = sizeof(typename C::real) == 8;
    constexpr int EACH = WIDE ? 2 : 4;
    constexpr bool WHOLE = C::KEYS_STEP % EACH == 0 && N % EACH == 0;
    constexpr int BLOCKS = WHOLE ? N / EACH : (N + 2 * EACH - 2) / EACH;
    unsigned bits = 0;
    #pragma unroll
    for (int block = 0; block < BLOCKS; block++) {
        const kiln_block4 drawn = kiln_philox(o.seed, o.stream, first / EACH + block);
        #pragma unroll
        for (int each = 0; each < EACH; each++) {
            bool kept;
            if (WIDE) {
                const kiln_u64 both = drawn.word[2 * each % 4] | (kiln_u64)drawn.word[(2 * each + 1) % 4] << 32;
                kept = (double)(both >> 11) * (1.0 / 9007199254740992.0) < (double)o.keep;
            } else {
                kept = kiln_uniform(drawn.word[each % 4]) < (float)o.keep;
            }
            bits |= (unsigned)kept << (block * EACH + each);
        }
    }
    return bits >> (WHOLE ? 0 : (int)(first % EACH));
}

// A head of an attention: where its masks are, and which number the first of its scores has.
template <class C> struct kiln_attention_plane {
    int batch, head, group;
    const typename C::mask_type* mask;
    const unsigned char* hidden;
    kiln_u64 row;

    __device__ kiln_attention_plane(const kiln_attention_operands<C>& o, int batch, int head)
        : batch(batch), head(head), group(head / (C::heads / C::key_heads))
    {
        mask = C::mask ? kiln_attention_head<typename C::mask_view>(o.mask, batch, head) : 0;
        hidden = C::hidden ? kiln_attention_head<typename C::hidden_view>(o.hidden, batch, head) : 0;
        row = ((kiln_u64)batch * C::heads + head) * C::queries;
    }

    // The state of ROWS by KEYS scores from here on: some tiles of the mask, or a part of one.
    template <int ROWS, int KEYS> __device__ int state(const kiln_attention_operands<C>& o, int row, int key) const
    {
        if (C::ordered) {
            if (key + KEYS - 1 <= row + C::ahead) return KILN_ATTENTION_OPEN;
            return key > row + ROWS - 1 + C::ahead ? KILN_ATTENTION_HIDDEN : KILN_ATTENTION_MIXED;
        }
        if (!C::mapped) return C::hidden ? KILN_ATTENTION_MIXED : KILN_ATTENTION_OPEN;
        typedef typename C::map_view map;
        const int* at = o.map + (batch * map::batch + head * map::head + row / C::TILE * map::row + key / C::TILE);
        const int state = *at;
        bool same = true;
        #pragma unroll
        for (int i = 0; i < ROWS; i += C::TILE) {
            #pragma unroll
            for (int j = 0; j < KEYS; j += C::TILE)
                if (i + j != 0 && row + i < C::queries && key + j < C::keys)
                    same = same && at[i / C::TILE * map::row + j / C::TILE] == state;
        }
        return same ? state : KILN_ATTENTION_MIXED;
    }

    // Whether the score is `fill`, whatever query and key are. There is none outside the head.
    __device__ bool hides(int query, int key) const
    {
        if (C::ordered) return query < C::queries && key < C::keys && key > query + C::ahead;
        return C::hidden && query < C::queries && key < C::keys
            && hidden[kiln_attention_place<typename C::hidden_view>(query, key)];
    }

    // The score of what has this product; `hide` says whether it is hidden. Both positions are inside the head.
    __device__ typename C::real score(
        const kiln_attention_operands<C>& o, typename C::real product, int query, int key, bool hide, bool kept) const
    {
        typedef typename C::real real;
        real add = 0;
        if (C::mask) add = kiln_attention_wide(mask[kiln_attention_place<typename C::mask_view>(query, key)]);
        real score = product * o.scale;
        if (C::drop_scores) score = kept ? score * o.factor : (real)0;
        score += add;
        // Choices, not branches: neighbouring keys of a thread may differ.
        if (C::hidden) score = hide ? (C::mask_last ? o.fill + add : o.fill) : score;
        if (C::causal) score = key > query + (C::keys - C::queries) ? -kiln_attention_infinity<real>() : score;
        return score;
    }
};

// Which tile of rows of which head a block has. Where some tiles have more to do than others, those of GROUPED heads, whose operands the
// cache holds, begin with the largest.
struct kiln_attention_turn {
    int tile, number;
};

template <class C> kiln_attention_turn kiln_attention_turn_of(int block, int tiles, int planes)
{
    if (!C::causal && !C::hidden) return { block % tiles, block / tiles };
    const int group = block / (tiles * C::GROUPED), within = block % (tiles * C::GROUPED);
    const int left = planes - group * C::GROUPED, heads = left < C::GROUPED ? left : C::GROUPED;
    return { within / heads, group * C::GROUPED + within % heads };
}

// One past the last key that causal order lets any of the rows before `end` see.
template <class C> int kiln_attention_keys(int end)
{
    if (!C::causal) return C::keys;
    const int seen = end + (C::keys - C::queries);
    return seen < C::keys ? seen : C::keys;
}

// Looks in which tiles of a mask keys are hidden, so that attention leaves out tiles that are hidden altogether, and reads the
// mask nowhere but in those that are mixed. A block looks at one tile of one head of the mask.
template <class C> void kiln_attention_map(const unsigned char* hidden, int* map)
{
    typedef typename C::map_view view;
    typedef typename C::hidden_view mask;
    const int key_tile = blockIdx.x % C::KEY_TILES;
    const int row_tile = blockIdx.x / C::KEY_TILES % C::map_rows;
    const int head = blockIdx.x / (C::KEY_TILES * C::map_rows) % C::map_heads;
    const int batch = blockIdx.x / (C::KEY_TILES * C::map_rows * C::map_heads);
    const unsigned char* from = kiln_attention_head<mask>(hidden, batch, head);
    bool some = false, all = true;
    // Bytes of a row of the tile, or words of four.
    constexpr int EACH = mask::vectors ? 4 : 1;
    constexpr int PARTS = C::TILE / EACH;
    #pragma unroll 4
    for (int at = threadIdx.x; at < C::TILE * PARTS; at += C::THREADS) {
        const int row = row_tile * C::TILE + at / PARTS, key = key_tile * C::TILE + at % PARTS * EACH;
        // A mask that rows share is looked at once.
        if (row >= (mask::row ? C::queries : 1) || key >= C::keys) continue;
        const unsigned char* place = from + kiln_attention_place<mask>(row, key);
        const unsigned found = EACH == 4 ? *(const unsigned*)place : *place;
        some = some || found != 0;
        all = all && found == (EACH == 4 ? 0x01010101u : 1u);
    }
    some = kiln_attention_any(some);
    all = !kiln_attention_any(!all);
    if (threadIdx.x == 0)
        map[batch * view::batch + head * view::head + row_tile * view::row + key_tile] =
            all ? KILN_ATTENTION_HIDDEN : some ? KILN_ATTENTION_MIXED : KILN_ATTENTION_OPEN;
}
