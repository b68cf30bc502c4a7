// How a block computes a tile of results on tensor cores.

struct alignas(8) Pair { float at[2]; };

// Two neighbouring results in memory.
struct alignas(2 * sizeof(O)) PairOfResults { O at[2]; };

// A tile of the result is shared out among warps, MT by NT products of each; a step of the depth takes BK words.
constexpr int BK = 32;
constexpr int WARP_ROWS = BM / ROW_WARPS, WARP_COLUMNS = BN / COLUMN_WARPS;
constexpr int MT = WARP_ROWS / 16, NT = WARP_COLUMNS / 8;
static_assert(ROW_WARPS * COLUMN_WARPS * 32 == THREADS && MT >= 1 && NT % 2 == 0, "the tile is not shared out evenly");

// Where the warp's part of the tile begins.
inline int warp_row() { return (int)(threadIdx.x / 32 / COLUMN_WARPS) * WARP_ROWS; }
inline int warp_column() { return (int)(threadIdx.x / 32 % COLUMN_WARPS) * WARP_COLUMNS; }

// The row in the tile of a lane's sums 2 `half` and 2 `half` + 1 of product `m`, and the column of the first of them, of product `n`.
inline int row_of(int m, int half) { return warp_row() + 16 * m + 8 * half + (int)(threadIdx.x % 32 / 4); }
inline int column_of(int n) { return warp_column() + 8 * n + (int)(threadIdx.x % 4) * 2; }

// Runs the steps from `step` to `end`: `fetch` begins to copy a step into a stage of shared memory, `multiply` adds its products to the sums. While one
// stage is multiplied, the others are on their way.
template <class Fetch, class Multiply> void pipeline(int step, int end, Fetch fetch, Multiply multiply)
{
    float* shared = (float*)kiln_dynamic_shared();
    #pragma unroll
    for (int ahead = 0; ahead < STAGES - 1; ahead++) {
        if (step + ahead < end) fetch(shared + ahead * STAGE, step + ahead);
        end_of_copies();
    }
    int stage = 0, next = STAGES - 1;
    #pragma unroll 1
    for (; step < end; step++) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        if (step + STAGES - 1 < end) fetch(shared + next * STAGE, step + STAGES - 1);
        end_of_copies();
        multiply(shared + stage * STAGE);
        next = stage;
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
}
