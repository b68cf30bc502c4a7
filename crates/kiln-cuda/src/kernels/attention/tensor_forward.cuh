// Attention on tensor cores, for types of 16 bits and for f32 as TF32: the plan of forward.cuh, with scores and weights in registers alone.
//
// A block has OWN rows of queries, 16 MT for each of its warps, and goes over tiles of OTHER = 8 NT keys. While it computes with one tile, the
// next one is copied into the other of two places in shared memory.

// What is between lanes: bit 4 n + 2 h + j says whether dropout keeps the score of query `query + g + 8 h` and key
// `key + 8 n + 2 t + j`. A block of Philox is for four neighbouring keys, of which two lanes have two each: where rows begin at blocks,
// one lane draws for row g, the other for row g + 8, and they exchange what they drew.
template <class C> unsigned kiln_attention_kept_in_rows(
    const kiln_attention_operands<C>& o, const kiln_attention_plane<C>& plane, int query, int key)
{
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    unsigned bits = 0;
    if (C::KEYS_STEP % 4 == 0) {
        const int odd = t % 2;
        const kiln_u64 first = (plane.row + query + g + 8 * odd) * C::keys + key + t / 2 * 4;
        unsigned mine = 0;
        #pragma unroll
        for (int n = 0; n < C::NT; n++) mine |= kiln_attention_kept<C, 4>(o, first + 8 * n) << (4 * n);
        const unsigned other = __shfl_xor_sync(0xffffffffu, mine, 1);
        const unsigned upper = odd ? other : mine, lower = odd ? mine : other;
        bits = (upper >> (2 * odd) & 0x33333333u) | (lower >> (2 * odd) & 0x33333333u) << 2;
    } else {
        #pragma unroll
        for (int n = 0; n < C::NT; n++) {
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const kiln_u64 first = (plane.row + query + g + 8 * h) * C::keys + key + 8 * n + 2 * t;
                bits |= (kiln_attention_kept<C, 2>(o, first) & 3) << (4 * n + 2 * h);
            }
        }
    }
    return bits;
}

// The bits of what is hidden, in the order of those of dropout. They are read before the products, which hide the time that this takes.
template <class C>
unsigned kiln_attention_hidden_in_rows(const kiln_attention_plane<C>& plane, int query, int key)
{
    typedef typename C::hidden_view view;
    // Two neighbouring keys at a time, where they are in one word of 16 bits.
    constexpr bool PAIRS = C::KEYS_STEP % 2 == 0 && view::vectors;
    query += threadIdx.x % 32 / 4;
    key += threadIdx.x % 4 * 2;
    unsigned bits = 0;
    #pragma unroll
    for (int n = 0; n < C::NT; n++) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = query + 8 * h, column = key + 8 * n;
            unsigned both = 0;
            if (C::ordered) {
                const int behind = column - row - C::ahead;
                both = behind > 0 ? 0x101 : behind == 0 ? 0x100 : 0;
            } else if (PAIRS) {
                if (row < C::queries && column < C::keys)
                    both = *(const unsigned short*)(plane.hidden + kiln_attention_place<view>(row, column));
            } else {
                both = plane.hides(row, column) | plane.hides(row, column + 1) << 8;
            }
            bits |= (both & 1 | both >> 7 & 2) << (4 * n + 2 * h);
        }
    }
    return bits;
}

// exp(score - most).
inline float kiln_attention_power(float score, float most)
{
    return kiln_fragment_power((score - most) * 1.44269504088896341f);
}

// The next tile from `from` on of which all keys are hidden, or one of which they are not; `end` if there is none. Says whether a hidden
// one was left out.
template <class C> int kiln_attention_next(
    const kiln_attention_operands<C>& o, const kiln_attention_plane<C>& plane, int row, int from, int end, bool hidden,
    bool& left_out)
{
    if (!C::mapped) return from;
    if (C::ordered && !hidden) {
        // Behind the first of them all are.
        if (from >= end || plane.template state<C::OWN, C::OTHER>(o, row, from) != KILN_ATTENTION_HIDDEN) return from;
        left_out = true;
        return end;
    }
    for (; from < end; from += C::OTHER) {
        const bool found = plane.template state<C::OWN, C::OTHER>(o, row, from) == KILN_ATTENTION_HIDDEN;
        if (found == hidden) break;
        left_out = left_out || found;
    }
    return from;
}

// Whether scores of a tile are products times the scale, and nothing else.
template <class C> bool kiln_attention_plain(int state, int query, int key, int keys)
{
    return !C::mask && !C::drop_scores && state == KILN_ATTENTION_OPEN && key + keys <= C::keys
        && (!C::causal || key + keys - 1 <= query + (C::keys - C::queries));
}

template <class C> struct kiln_attention_tensor_rows {
    float most[C::MT][2], total[C::MT][2], sums[C::MT][C::VALUE_WIDE / 8][4];
};

// Takes a tile of products into the sums of the rows, and gives the weights.
template <class C, bool PLAIN>
void kiln_attention_tensor_softmax(
    const kiln_attention_operands<C>& o, const kiln_attention_plane<C>& plane, kiln_attention_tensor_rows<C>& rows,
    float (&s)[C::MT][C::NT][4], const unsigned (&kept)[C::MT], const unsigned (&hidden)[C::MT], int query, int key,
    kiln_u32 (&weights)[C::MT][C::NT][kiln_fragment_of<typename C::stored>::WORDS])
{
    const float infinity = kiln_attention_infinity<float>();
    #pragma unroll
    for (int m = 0; m < C::MT; m++) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const int row = query + 16 * m + 8 * h;
            float most = rows.most[m][h];
            #pragma unroll
            for (int n = 0; n < C::NT; n++) {
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    float& x = s[m][n][2 * h + j];
                    const int column = key + 8 * n + j, bit = 4 * n + 2 * h + j;
                    if (PLAIN) {
                        x *= o.scale;
                    } else if (!C::mask) {
                        x = plane.score(o, x, row, column, hidden[m] >> bit & 1, kept[m] >> bit & 1);
                        x = C::whole || (row < C::queries && column < C::keys) ? x : -infinity;
                    } else if (row < C::queries && column < C::keys) {
                        x = plane.score(o, x, row, column, hidden[m] >> bit & 1, kept[m] >> bit & 1);
                    } else {
                        x = -infinity;
                    }
                    most = fmaxf(x, most);
                }
            }
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
            most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2));
            const float base = most == -infinity ? 0 : most;
            const float shrink = kiln_attention_power(rows.most[m][h], base);
            const float scaled = base * 1.44269504088896341f;
            rows.most[m][h] = most;
            rows.total[m][h] *= shrink;
            #pragma unroll
            for (int n = 0; n < C::NT; n++) {
                float weight[2];
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float x = s[m][n][2 * h + j];
                    // The difference is exact where scores are `fill`; elsewhere one instruction computes it with the factor.
                    weight[j] = PLAIN ? kiln_fragment_power(x * 1.44269504088896341f - scaled) : kiln_attention_power(x, base);
                    rows.total[m][h] += weight[j];
                    if (C::dropout && !C::drop_scores)
                        weight[j] = kept[m] >> (4 * n + 2 * h + j) & 1 ? weight[j] * o.factor : 0;
                }
                kiln_fragment_weigh<typename C::stored>(weights[m][n], h, weight[0], weight[1]);
            }
            #pragma unroll
            for (int c = 0; c < C::VALUE_WIDE / 8; c++) {
                rows.sums[m][c][2 * h] *= shrink;
                rows.sums[m][c][2 * h + 1] *= shrink;
            }
        }
    }
}

template <class C>
void kiln_attention_tensor_forward(const kiln_attention_operands<C>& o, typename C::stored* out, float* stats)
{
    typedef typename C::stored stored;
    typedef typename kiln_fragment_of<stored>::element element;
    constexpr int KEYS = kiln_attention_elements<C, C::OTHER, C::WIDE>();
    constexpr int BOTH = KEYS + kiln_attention_elements<C, C::OTHER, C::VALUE_WIDE>();
    element* own = (element*)kiln_attention_shared<C>();
    element* tiles = own + kiln_attention_elements<C, C::OWN, C::WIDE>();
    const kiln_attention_turn turn = kiln_attention_turn_of<C>(blockIdx.x, C::OWN_TILES, C::batch * C::heads);
    const int tile = C::OWN_TILES - 1 - turn.tile, number = turn.number;
    const kiln_attention_plane<C> plane(o, number / C::heads, number % C::heads);
    const auto queries = kiln_attention_head<typename C::query_view>(o.query, plane.batch, plane.head);
    const auto keys = kiln_attention_head<typename C::key_view>(o.key, plane.batch, plane.group);
    const auto values = kiln_attention_head<typename C::value_view>(o.value, plane.batch, plane.group);
    const int first = tile * C::OWN, warp = threadIdx.x / 32 * 16 * C::MT;
    // The first of this lane's rows, and of its columns in a tile.
    const int row = first + warp + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    kiln_fragment_fetch<C, typename C::query_view, C::OWN, C::WIDE>(own, queries, first, C::queries);

    kiln_attention_tensor_rows<C> rows = {};
    for (int m = 0; m < C::MT; m++) rows.most[m][0] = rows.most[m][1] = -kiln_attention_infinity<float>();
    const int end = kiln_attention_keys<C>(first + C::OWN);
    int place = 0;
    bool left_out = false;
    // As in forward.cuh: tiles that are hidden altogether come last, if they count.
    for (int pass = 0; pass < (C::mapped ? 2 : 1); pass++) {
        if (pass == 1) {
            bool counts = false;
            for (int m = 0; m < C::MT; m++)
                for (int h = 0; h < 2; h++)
                    counts = counts || (row + 16 * m + 8 * h < C::queries
                                 && o.fill - rows.most[m][h] > -kiln_attention_reach(o.fill));
            if (!left_out || !kiln_attention_any(counts)) break;
        }
        int at = kiln_attention_next<C>(o, plane, first, 0, end, pass == 1, left_out);
        auto fetch = [&](int from, int where) {
            element* to = tiles + where * BOTH;
            kiln_fragment_fetch<C, typename C::key_view, C::OTHER, C::WIDE>(to, keys, from, C::keys);
            kiln_fragment_fetch<C, typename C::value_view, C::OTHER, C::VALUE_WIDE>(to + KEYS, values, from, C::keys);
            kiln_copies_end_group();
        };
        if (at < end) fetch(at, place);
        if (kiln_fragment_of<stored>::ROUNDED && pass == 0) {
            kiln_copies_wait();
            kiln_fragment_settle<C, C::OWN, C::WIDE>(own);
        }
        int state = at < end ? plane.template state<C::OWN, C::OTHER>(o, first, at) : 0;
        #pragma unroll 1
        while (at < end) {
            const int following = kiln_attention_next<C>(o, plane, first, at + C::OTHER, end, pass == 1, left_out);
            kiln_copies_wait();
            kiln_fragment_settle<C, C::OTHER, C::WIDE>(tiles + place * BOTH);
            kiln_fragment_settle<C, C::OTHER, C::VALUE_WIDE>(tiles + place * BOTH + KEYS);
            kiln_attention_landed<C>();
            __syncthreads();
            if (following < end) fetch(following, 1 - place);
            const element* with = tiles + place * BOTH;
            const int coming = following < end ? plane.template state<C::OWN, C::OTHER>(o, first, following) : 0;
            unsigned kept[C::MT] = {}, hidden[C::MT] = {};
            if (state != KILN_ATTENTION_OPEN)
                for (int m = 0; m < C::MT; m++)
                    hidden[m] = kiln_attention_hidden_in_rows<C>(plane, first + warp + 16 * m, at);
            float s[C::MT][C::NT][4];
            kiln_attention_dot<C, C::WIDE, true>(s, own, with);
            if (C::dropout)
                for (int m = 0; m < C::MT; m++)
                    kept[m] = kiln_attention_kept_in_rows<C>(o, plane, first + warp + 16 * m, at);
            kiln_attention_settle<C>(s);
            kiln_u32 weights[C::MT][C::NT][kiln_fragment_of<stored>::WORDS];
            if (kiln_attention_plain<C>(state, first, at, C::OTHER))
                kiln_attention_tensor_softmax<C, true>(
                    o, plane, rows, s, kept, hidden, row, at + column, weights);
            else
                kiln_attention_tensor_softmax<C, false>(
                    o, plane, rows, s, kept, hidden, row, at + column, weights);
            kiln_attention_combine<C, C::MT, C::VALUE_WIDE>(rows.sums, weights, with + KEYS);
            kiln_attention_settle<C>(rows.sums);
            place = 1 - place;
            at = following;
            state = coming;
        }
    }

    kiln_copies_wait();
    const auto result = kiln_attention_head<typename C::out_view>(out, plane.batch, plane.head);
    for (int m = 0; m < C::MT; m++) {
        for (int h = 0; h < 2; h++) {
            float total = rows.total[m][h], most = rows.most[m][h];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            if (most == -kiln_attention_infinity<float>()) {
                total = C::safe ? 1 : most - most;
                if (C::safe) most = 0;
            }
            const int at = row + 16 * m + 8 * h;
            if (at >= C::queries) continue;
            kiln_fragment_store<typename C::out_view, C::VALUE_WIDE>(result, at, rows.sums[m], h, 1 / total);
            if (threadIdx.x % 4 == 0) {
                stats[(plane.row + at) * 2] = most;
                stats[(plane.row + at) * 2 + 1] = total;
            }
        }
    }
}
