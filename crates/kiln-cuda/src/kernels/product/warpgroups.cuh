// Products of matrices of 16 bits by the instructions that Hopper has for a group of four warps (`wgmma`), which read their operands
// from shared memory, and by its copy engine (TMA), which brings them there.
//
// A block computes tiles of TILE_ROWS by TILE_COLUMNS results, one after the other. Its warps have parts of their own, so that loading,
// multiplying, and what follows the product go on at the same time:
//
//     warp 0              asks the engine for the operands of the next steps of the depth, DEPTH each, into STAGES places
//     warps 4 to 11       multiply: two groups, each with half of the rows of a tile in its registers; or one group, warps 4 to 7
//     the other warps     finish the tile before: they compute what follows the product from its results, and store that
//
// Barriers in shared memory are where they meet. A place is `full` once the engine has written it, `empty` once all groups have read it.
// A tile of results between those who multiply and those who finish is `ready`, or `taken`. A right operand that stays in shared memory
// while a block stays in its columns is there once `right` is over.
//
// Operands lie in shared memory in rows of 128 bytes, whose 16-byte pieces the engine exchanges among eight rows, so that no two rows
// of a fragment are in the same banks. An operand whose neighbours in memory are along the depth has a row for each of its rows (or
// columns). A turned one, whose neighbours are along its rows (or columns), has a row for each step of the depth, in blocks of 64 of them.
//
// What a case C says: STAGES, TILE_ROWS, TILE_COLUMNS, GROUPS (that multiply), FINISHERS (threads; none where those who multiply store
// their results), RESULTS (tiles of them between the two), PIECES_KEPT, RIGHT_STEPS (steps of the depth of a right operand that stays in
// shared memory; none where it comes to the places, beside the left one), LEFT_TURNED, RIGHT_TURNED, DEPTH_IN_PIECES (whether both operands
// lie in several matrices along the depth), KEEPS_COLUMNS, IN_WINDOWS, `element`, and two functions of the tile's width: `multiply` and
// `settle`.
//
// IN_WINDOWS the rows of the left operand are the windows of an image, its channels last: the pixels under the first tap, then those under
// the next one. The engine takes them from the image, tap by tap, and puts zeros where they are beyond it. Such a case also says CHANNELS
// (of a tap: whole steps of the depth), WINDOW_H and WINDOW_W (taps), DILATION_H and DILATION_W (pixels between those), STRIDE_H and STRIDE_W
// (pixels between windows), LOW_H and LOW_W (where the first window begins), RESULT_H and RESULT_W (windows of an image), and MIRRORED_BY:
// columns of the right operand from a tap to the one before, where those lie side by side and not one after the other along the depth.

// Where the engine finds a matrix: written by the driver.
struct alignas(64) kiln_matrix { kiln_u64 words[16]; };

struct kiln_product_size { int rows, columns, reach; };

// Eight neighbours of 16 bits, moved at once and widened, or rounded two at a time: one instruction for each, or for two.
template <class T> struct kiln_eight {
    uint4 words;

    kiln_eight() {}
    kiln_eight(const T* from) : words(*(const uint4*)from) {}

    kiln_u32 word(int i) const { return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w; }

    float wide(int i) const
    {
        const kiln_u32 both = word(i / 2);
        return kiln_widen(T{ (kiln_u16)(i % 2 ? both >> 16 : both) });
    }

    void store(T* to) const { *(uint4*)to = words; }
};

template <> inline float kiln_eight<kiln_bf16>::wide(int i) const
{
    const kiln_u32 both = word(i / 2);
    return __uint_as_float(i % 2 ? both & 0xffff0000u : both << 16);
}

template <class T> void kiln_store_eight(T* to, const float (&x)[8])
{
    *(uint4*)to = make_uint4(kiln_pack<T>(x[0], x[1]), kiln_pack<T>(x[2], x[3]), kiln_pack<T>(x[4], x[5]), kiln_pack<T>(x[6], x[7]));
}

inline void kiln_barrier_begin(kiln_u32 barrier, int arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

// Arrives, and lets the barrier wait for so many bytes from the engine.
inline void kiln_barrier_expect(kiln_u32 barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

inline void kiln_barrier_arrive(kiln_u32 barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// Waits until the phase of this parity is over. The phase before the first one is.
inline void kiln_barrier_wait(kiln_u32 barrier, kiln_u32 parity)
{
    int over;
    do {
        asm volatile(
            "{\n.reg .pred past;\nmbarrier.try_wait.parity.shared::cta.b64 past, [%1], %2;\nselp.s32 %0, 1, 0, past;\n}"
            : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
    } while (!over);
}

// Asks the engine for the box of a matrix that begins at column `inner` of row `outer`. What is beyond the matrix becomes zeros.
inline void kiln_product_box(kiln_u32 to, const kiln_matrix* matrix, int inner, int outer, kiln_u32 barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        :: "r"(to), "l"(matrix), "r"(inner), "r"(outer), "r"(barrier) : "memory");
}

// Asks the engine for what lies under the tap (down, across) of so many windows of an image: channels from `channel` on. The first window
// begins at the pixel (x, y) of image number `image`.
inline void kiln_product_windows(
    kiln_u32 to, const kiln_matrix* images, int channel, int x, int y, int image, int across, int down, kiln_u32 barrier)
{
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6], {%7, %8};"
        :: "r"(to), "l"(images), "r"(channel), "r"(x), "r"(y), "r"(image), "r"(barrier), "h"((kiln_u16)across), "h"((kiln_u16)down) : "memory");
}

// A block's shared memory: places for operands, the right operand where it stays, tiles of results, barriers.
template <class C> struct kiln_product_shared {
    static_assert(C::STAGES >= 2, "one place is filled while another is multiplied");
    static_assert(C::TILE_ROWS % (64 * C::GROUPS) == 0, "each group has as many rows");
    static_assert(!C::RIGHT_STEPS || (C::KEEPS_COLUMNS && !C::DEPTH_IN_PIECES), "a right operand of the block's columns, in one piece");
    static constexpr int TILE_ROWS = C::TILE_ROWS, DEPTH = 64;
    // 64 rows (or columns) of an operand; a turned one comes in whole ones.
    static constexpr int BLOCK = 64 * DEPTH * 2, RIGHT_BLOCKS = (C::TILE_COLUMNS + 63) / 64;
    static constexpr int LEFT_BYTES = TILE_ROWS * DEPTH * 2, RIGHT_BYTES = C::RIGHT_TURNED ? RIGHT_BLOCKS * BLOCK : C::TILE_COLUMNS * DEPTH * 2;
    static constexpr bool RIGHT_STAYS = C::RIGHT_STEPS > 0;
    static constexpr int STAGE = RIGHT_STAYS ? LEFT_BYTES : LEFT_BYTES + RIGHT_BYTES, STAYING = C::RIGHT_STEPS * RIGHT_BYTES;
    static_assert(STAYING < 1 << 20, "as many bytes as a barrier counts");
    // From a row of results to the next: sixteen bytes more than they have, so that eight rows are in different banks.
    static constexpr int PITCH = C::TILE_COLUMNS * 2 + 16, RESULT = TILE_ROWS * PITCH;
    // Threads that finish have eight neighbouring columns each, and as many rows are finished at once as they are enough for.
    static constexpr int ACROSS = C::TILE_COLUMNS / 8, LINES = C::FINISHERS / ACROSS;

    // Behind the results is what a block keeps of its columns, then what threads have ahead.
    unsigned char *operands, *results, *kept, *ahead;
    kiln_u32 places, staying, full, empty, ready, taken, right;

    kiln_product_shared()
    {
        __shared__ kiln_u64 barriers[2 * C::STAGES + 2 * C::RESULTS + RIGHT_STAYS];
        // Places begin at multiples of 1024 bytes, which is what the exchange of pieces goes by.
        unsigned char* memory = kiln_dynamic_shared();
        memory += -kiln_address_in_shared(memory) & 1023;
        operands = memory;
        places = kiln_address_in_shared(memory);
        staying = places + C::STAGES * STAGE;
        results = memory + C::STAGES * STAGE + STAYING;
        kept = results + C::RESULTS * RESULT;
        ahead = kept + C::PIECES_KEPT * ACROSS * 16;
        full = kiln_address_in_shared(barriers);
        empty = full + 8 * C::STAGES;
        ready = empty + 8 * C::STAGES;
        taken = ready + 8 * C::RESULTS;
        right = taken + 8 * C::RESULTS;
        if (threadIdx.x == 0) {
            for (int i = 0; i < C::STAGES; i++) {
                kiln_barrier_begin(full + 8 * i, 1);
                kiln_barrier_begin(empty + 8 * i, C::GROUPS);
            }
            for (int i = 0; i < C::RESULTS; i++) {
                kiln_barrier_begin(ready + 8 * i, 128 * C::GROUPS);
                if (C::FINISHERS) kiln_barrier_begin(taken + 8 * i, C::FINISHERS);
            }
            if (RIGHT_STAYS) kiln_barrier_begin(right, 1);
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncthreads();
    }

    // Eight neighbouring results of a row, in a tile of them.
    kiln_eight<typename C::element> at(int tile, int row, int column) const
    {
        return kiln_eight<typename C::element>((const typename C::element*)(results + tile * RESULT + row * PITCH + column * 2));
    }
};

// The tiles of a block, in the order in which it computes them. All blocks together go down bands of eight tiles, column by column, so that
// those that run at the same time share operands in L2. A block that KEEPS_COLUMNS has all its tiles in the same ones; as many blocks as
// there are tiles across, or a multiple of that, then go down together.
template <class C> struct kiln_product_tile {
    static constexpr int BAND = 8;
    int number, down, across, row, column;

    kiln_product_tile(const kiln_product_size& size)
        : number(blockIdx.x), down((size.rows + C::TILE_ROWS - 1) / C::TILE_ROWS), across((size.columns + C::TILE_COLUMNS - 1) / C::TILE_COLUMNS)
    {
        place();
    }

    bool exists() const { return number < down * across; }

    void next()
    {
        number += gridDim.x;
        place();
    }

private:
    void place()
    {
        if (C::KEEPS_COLUMNS) {
            row = number / across * C::TILE_ROWS;
            column = number % across * C::TILE_COLUMNS;
            return;
        }
        const int band = number / (BAND * across), within = number % (BAND * across);
        const int tall = down - band * BAND < BAND ? down - band * BAND : BAND;
        // Behind the last tile there is none.
        row = tall > 0 ? (band * BAND + within % tall) * C::TILE_ROWS : 0;
        column = tall > 0 ? within / tall * C::TILE_COLUMNS : 0;
    }
};

// An operand that lies in COUNT matrices: their rows (or columns, or steps of the depth) are numbered on from one to the next. Each begins
// at the border of a tile (or of a place).
template <int COUNT> struct kiln_product_pieces {
    const kiln_matrix* each[COUNT];
    int starts[COUNT];

    // The matrix that has number `at` of all, which becomes a number within it.
    const kiln_matrix* find(int& at) const
    {
        const kiln_matrix* matrix = each[0];
        int start = 0;
        #pragma unroll
        for (int i = 1; i < COUNT; i++)
            if (at >= starts[i]) matrix = each[i], start = starts[i];
        at -= start;
        return matrix;
    }
};

// Asks for a step of the depth of the right operand's columns, from `column` on.
template <class C> void kiln_product_load_right(kiln_u32 to, const kiln_matrix* right, int from, int column, kiln_u32 barrier)
{
    typedef kiln_product_shared<C> S;
    if constexpr (C::IN_WINDOWS) {
        if constexpr (C::MIRRORED_BY > 0) {
            column += (C::WINDOW_H * C::WINDOW_W - 1 - from / C::CHANNELS) * C::MIRRORED_BY;
            from %= C::CHANNELS;
        }
    }
    if (C::RIGHT_TURNED) {
        #pragma unroll
        for (int i = 0; i < S::RIGHT_BLOCKS; i++)
            kiln_product_box(to + i * S::BLOCK, right, column + 64 * i, from, barrier);
    } else {
        kiln_product_box(to, right, from, column, barrier);
    }
}

// Asks for a step of the depth of the left operand's rows, from `row` on.
template <class C> void kiln_product_load_left(kiln_u32 to, const kiln_matrix* left, int from, int row, kiln_u32 barrier)
{
    typedef kiln_product_shared<C> S;
    if constexpr (C::IN_WINDOWS) {
        static_assert(C::CHANNELS % S::DEPTH == 0 && !C::LEFT_TURNED && !C::DEPTH_IN_PIECES, "a step of the depth is of one tap");
        const int tap = from / C::CHANNELS, channel = from % C::CHANNELS;
        const int line = row / C::RESULT_W, x = row % C::RESULT_W, image = line / C::RESULT_H, y = line % C::RESULT_H;
        kiln_product_windows(
            to, left, channel, x * C::STRIDE_W + C::LOW_W, y * C::STRIDE_H + C::LOW_H, image,
            tap % C::WINDOW_W * C::DILATION_W, tap / C::WINDOW_W * C::DILATION_H, barrier);
    } else if (C::LEFT_TURNED) {
        #pragma unroll
        for (int i = 0; i < S::TILE_ROWS / 64; i++)
            kiln_product_box(to + i * S::BLOCK, left, row + 64 * i, from, barrier);
    } else {
        kiln_product_box(to, left, from, row, barrier);
    }
}

// The part of warp 0.
template <class C, int LEFTS, int RIGHTS> void kiln_product_load(
    const kiln_product_pieces<LEFTS>& lefts, const kiln_product_pieces<RIGHTS>& rights, const kiln_product_size& size,
    const kiln_product_shared<C>& shared)
{
    typedef kiln_product_shared<C> S;
    if (threadIdx.x != 0) return;
    int at = 0;
    kiln_u32 round = 0;
    kiln_product_tile<C> tile(size);
    if (S::RIGHT_STAYS && tile.exists()) {
        kiln_barrier_expect(shared.right, S::STAYING);
        #pragma unroll
        for (int i = 0; i < C::RIGHT_STEPS; i++)
            kiln_product_load_right<C>(shared.staying + i * S::RIGHT_BYTES, rights.each[0], i * S::DEPTH, tile.column, shared.right);
    }
    for (; tile.exists(); tile.next()) {
        int row = tile.row, column = tile.column;
        const kiln_matrix *left = lefts.each[0], *right = rights.each[0];
        if (!C::DEPTH_IN_PIECES) left = lefts.find(row), right = rights.find(column);
        for (int step = 0; step < size.reach; step += S::DEPTH) {
            int from = step;
            if (C::DEPTH_IN_PIECES) {
                right = rights.find(from);
                from = step;
                left = lefts.find(from);
            }
            const kiln_u32 barrier = shared.full + 8 * at, to = shared.places + at * S::STAGE;
            kiln_barrier_wait(shared.empty + 8 * at, round ^ 1);
            kiln_barrier_expect(barrier, S::STAGE);
            kiln_product_load_left<C>(to, left, from, row, barrier);
            if (!S::RIGHT_STAYS) kiln_product_load_right<C>(to + S::LEFT_BYTES, right, from, column, barrier);
            if (++at == C::STAGES) at = 0, round ^= 1;
        }
    }
}

// The part of those who multiply. `store` is given the sums of two neighbours, in a case without FINISHERS: (row, column, first, second).
template <class C, class Store> void kiln_product_multiply(
    const kiln_product_size& size, const kiln_product_shared<C>& shared, const Store& store)
{
    typedef kiln_product_shared<C> S;
    // A group has every other 64 rows of a tile, or all of them.
    constexpr int APART = 64 * C::GROUPS, PARTS = S::TILE_ROWS / APART;
    const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 128;
    // A lane has neighbours of two rows of each eight columns.
    const int down = group * 64 + lane / 32 * 16 + lane % 32 / 4, across = lane % 4 * 2;
    int at = 0, result = 0;
    kiln_u32 round = 0, turn = 0;
    float sums[PARTS][C::TILE_COLUMNS / 2];
    kiln_product_tile<C> tile(size);
    if (S::RIGHT_STAYS && tile.exists()) kiln_barrier_wait(shared.right, 0);
    for (; tile.exists(); tile.next()) {
        int behind = 0;
        for (int from = 0; from < size.reach; from += S::DEPTH) {
            kiln_barrier_wait(shared.full + 8 * at, round);
            const kiln_u32 place = shared.places + at * S::STAGE;
            kiln_u64 left = kiln_group_operand(place + group * S::BLOCK, S::BLOCK);
            // Steps are DEPTH apart, and their right operands RIGHT_BYTES.
            const kiln_u32 beside = S::RIGHT_STAYS ? shared.staying + from * (S::RIGHT_BYTES / S::DEPTH) : place + S::LEFT_BYTES;
            kiln_u64 right = kiln_group_operand(beside, S::BLOCK);
            kiln_group_begin();
            #pragma unroll
            for (int k = 0; k < S::DEPTH / 16; k++) {
                #pragma unroll
                for (int part = 0; part < PARTS; part++) C::multiply(sums[part], left + part * (C::GROUPS * S::BLOCK >> 4), right, from > 0 || k > 0);
                // Sixteen steps of the depth: 32 bytes of a row, or sixteen rows.
                left += C::LEFT_TURNED ? 2048 >> 4 : 32 >> 4;
                right += C::RIGHT_TURNED ? 2048 >> 4 : 32 >> 4;
            }
            kiln_group_commit();
            if (from > 0) {
                // The step before is over: its place is free.
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (lane == 0) kiln_barrier_arrive(shared.empty + 8 * behind);
            }
            behind = at;
            if (++at == C::STAGES) at = 0, round ^= 1;
        }
        #pragma unroll
        for (int part = 0; part < PARTS; part++) C::settle(sums[part]);
        if (lane == 0) kiln_barrier_arrive(shared.empty + 8 * behind);
        if (C::FINISHERS) {
            kiln_barrier_wait(shared.taken + 8 * result, turn ^ 1);
            // A warp has sixteen rows. Each lane gives the address of a row of one of four matrices of eight by eight.
            const kiln_u32 to = kiln_address_in_shared(shared.results) + result * S::RESULT + (group * 64 + lane / 32 * 16 + lane % 16) * S::PITCH + lane % 32 / 16 * 16;
            #pragma unroll
            for (int part = 0; part < PARTS; part++) {
                #pragma unroll
                for (int j = 0; j < C::TILE_COLUMNS / 16; j++) {
                    kiln_u32 words[4];
                    #pragma unroll
                    for (int i = 0; i < 4; i++)
                        words[i] = kiln_pack<typename C::element>(sums[part][8 * j + 2 * i], sums[part][8 * j + 2 * i + 1]);
                    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                        :: "r"(to + part * APART * S::PITCH + 32 * j), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3]) : "memory");
                }
            }
            kiln_barrier_arrive(shared.ready + 8 * result);
            if (++result == C::RESULTS) result = 0, turn ^= 1;
        } else {
            #pragma unroll
            for (int part = 0; part < PARTS; part++) {
                #pragma unroll
                for (int j = 0; j < C::TILE_COLUMNS / 8; j++) {
                    #pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const int row = tile.row + part * APART + down + 8 * h, column = tile.column + across + 8 * j;
                        if (row < size.rows && column < size.columns)
                            store(row, column, sums[part][4 * j + 2 * h], sums[part][4 * j + 2 * h + 1]);
                    }
                }
            }
        }
    }
}

// What a thread that finishes has asked for: one turn ahead, in registers.
template <class Loaded> struct kiln_next_turn {
    Loaded next;

    template <class Prepare> void begin(const Prepare& prepare) { prepare(next); }

    template <class Prepare> Loaded turn(const Prepare& prepare)
    {
        const Loaded now = next;
        prepare(next);
        return now;
    }
};

// The same AHEAD - 1 turns ahead, in places of shared memory that are a thread's own: BYTES each.
template <class Loaded, int AHEAD, int BYTES> struct kiln_turns_ahead {
    static_assert(sizeof(Loaded) <= BYTES && BYTES % 32 == 16, "neighbouring threads are in different banks");
    unsigned char* places;
    int distance, to, at;

    kiln_turns_ahead(unsigned char* memory, int lane, int threads) : places(memory + lane * BYTES), distance(threads * BYTES), to(0), at(0) {}

    template <class Prepare> void begin(const Prepare& prepare)
    {
        #pragma unroll
        for (int i = 0; i < AHEAD - 1; i++) ask(prepare);
    }

    template <class Prepare> Loaded turn(const Prepare& prepare)
    {
        // Its place is that of the turn before, which is over.
        ask(prepare);
        asm volatile("cp.async.wait_group %0;" :: "n"(AHEAD - 1) : "memory");
        const Loaded now = *(const Loaded*)(places + at * distance);
        if (++at == AHEAD) at = 0;
        return now;
    }

private:
    template <class Prepare> void ask(const Prepare& prepare)
    {
        prepare(*(Loaded*)(places + to * distance));
        asm volatile("cp.async.commit_group;" ::: "memory");
        if (++to == AHEAD) to = 0;
    }
};

// Copies a vector to shared memory, which is there when the group of copies is.
template <class V> void kiln_copy_ahead(V& to, const void* from)
{
    constexpr int EACH = sizeof(V) % 16 == 0 ? 16 : sizeof(V) % 8 == 0 ? 8 : 4;
    static_assert(sizeof(V) % EACH == 0, "vectors of whole words");
    #pragma unroll
    for (int i = 0; i < (int)sizeof(V); i += EACH) {
        const kiln_u32 place = kiln_address_in_shared(&to) + i;
        const char* words = (const char*)from + i;
        // Nobody reads these bytes again: whole pieces go past the cache, which has what threads share.
        if (EACH == 16)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(place), "l"(words) : "memory");
        else
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(place), "l"(words), "n"(EACH) : "memory");
    }
}

// The number of a thread among those that finish.
template <class C> int kiln_product_finisher() { return threadIdx.x < 128 ? threadIdx.x - 32 : threadIdx.x - 32 - 128 * C::GROUPS; }

// What the rows of a block that KEEPS_COLUMNS share, a V of each eight columns, in PIECES_KEPT pieces of sixteen bytes: those of all
// threads side by side lie next to each other, so that they are in different banks. `load` is given the column, `first` is the number of
// the first piece.
template <class C, class V, class Load> void kiln_product_keep(
    const kiln_product_size& size, const kiln_product_shared<C>& shared, int first, const Load& load)
{
    constexpr int ACROSS = kiln_product_shared<C>::ACROSS;
    static_assert(sizeof(V) % 16 == 0, "vectors of whole pieces");
    const int lane = kiln_product_finisher<C>(), column = kiln_product_tile<C>(size).column + lane * 8;
    if (lane >= ACROSS || column >= size.columns) return;
    const V own = load(column);
    #pragma unroll
    for (int i = 0; i < (int)sizeof(V) / 16; i++) ((uint4*)shared.kept)[(first + i) * ACROSS + lane] = ((const uint4*)&own)[i];
}

// All threads that finish have kept theirs.
template <class C> void kiln_product_all_kept() { asm volatile("bar.sync 1, %0;" :: "n"(C::FINISHERS) : "memory"); }

template <class C, class V> V kiln_product_kept(const kiln_product_shared<C>& shared, int first)
{
    constexpr int ACROSS = kiln_product_shared<C>::ACROSS;
    V own;
    #pragma unroll
    for (int i = 0; i < (int)sizeof(V) / 16; i++)
        ((uint4*)&own)[i] = ((const uint4*)shared.kept)[(first + i) * ACROSS + kiln_product_finisher<C>() % ACROSS];
    return own;
}

// Adds up what threads that finish the same columns keep, row by row of them, behind the last tile; each column's is given to one of them.
template <class C, class T, class Join, class Store> void kiln_product_columns(
    const kiln_product_size& size, const kiln_product_shared<C>& shared, const T (&own)[8], const Join& join, const Store& store)
{
    typedef kiln_product_shared<C> S;
    const int lane = kiln_product_finisher<C>(), line = lane / S::ACROSS;
    static_assert(C::FINISHERS * 8 * sizeof(T) <= C::STAGES * S::STAGE + S::STAYING, "all of them where operands were");
    T* lines = (T*)shared.operands;
    // Nobody reads operands, or what was there before, any more.
    asm volatile("bar.sync 1, %0;" :: "n"(C::FINISHERS) : "memory");
    if (line < S::LINES) {
        #pragma unroll
        for (int l = 0; l < 8; l++) lines[line * C::TILE_COLUMNS + lane % S::ACROSS * 8 + l] = own[l];
    }
    asm volatile("bar.sync 1, %0;" :: "n"(C::FINISHERS) : "memory");
    const int first = kiln_product_tile<C>(size).column;
    for (int column = lane; column < C::TILE_COLUMNS && first + column < size.columns; column += C::FINISHERS) {
        T x = lines[column];
        #pragma unroll
        for (int i = 1; i < S::LINES; i++) x = join(x, lines[i * C::TILE_COLUMNS + column]);
        store(first + column, x);
    }
}

// The part of those who finish. Each thread has eight neighbouring columns of every LINES-th row, TOGETHER rows at a turn: while it computes
// with some, what it needs besides the product for later ones is on its way, across the border of tiles too.
//
//     queue                                         has what was asked for
//     load(loaded, k, row, column)                  asks for what row number k of a turn needs
//     points(loaded, tile, down, across, row, column)
//                                                   computes and stores the rows of a turn: from row `down` and column `across` of the tile
//                                                   on, which are `row` and `column` of the result. `tile` says in which of RESULTS they are
//     behind()                                      follows the rows of a tile
template <class C, int TOGETHER, class Loaded, class Queue, class Load, class Points, class Behind> void kiln_product_finish(
    const kiln_product_size& size, const kiln_product_shared<C>& shared, Queue queue, const Load& load, const Points& points, const Behind& behind)
{
    typedef kiln_product_shared<C> S;
    constexpr int LINES = S::LINES, EACH = LINES * TOGETHER, TURNS = (S::TILE_ROWS + EACH - 1) / EACH;
    const int lane = kiln_product_finisher<C>(), across = lane % S::ACROSS * 8, line = lane / S::ACROSS;
    // Threads that are left over when columns are shared out only arrive.
    const bool works = line < LINES;
    kiln_product_tile<C> tile(size), coming(size);
    int coming_down = line;
    const auto prepare = [&](Loaded& loaded) {
        if (!coming.exists()) return;
        #pragma unroll
        for (int k = 0; k < TOGETHER; k++) {
            const int down = coming_down + LINES * k;
            if (down < S::TILE_ROWS && coming.row + down < size.rows && coming.column + across < size.columns)
                load(loaded, k, coming.row + down, coming.column + across);
        }
        coming_down += EACH;
        if (coming_down < line + EACH * TURNS) return;
        coming_down = line;
        coming.next();
    };
    if (works) queue.begin(prepare);
    int result = 0;
    kiln_u32 round = 0;
    for (; tile.exists(); tile.next()) {
        kiln_barrier_wait(shared.ready + 8 * result, round);
        if (works) {
            for (int turn = 0; turn < TURNS; turn++) {
                const Loaded now = queue.turn(prepare);
                const int from = line + EACH * turn;
                if (tile.column + across < size.columns) points(now, result, from, across, tile.row + from, tile.column + across);
            }
            behind();
        }
        kiln_barrier_arrive(shared.taken + 8 * result);
        if (++result == C::RESULTS) result = 0, round ^= 1;
    }
}
