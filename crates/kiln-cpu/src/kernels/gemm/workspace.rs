//! The working memory of a matrix product: its regions.

use super::GemmSpec;
use super::plan::{Parallel, ProductPlan, Stream};
use crate::isa::Isa;
use crate::kernels::round_up;

/// Bytes between regions of the workspace.
const REGION: usize = 64;

/// Column panels after which the epilogue runs, where rows are streamed.
pub(super) const WIDE: usize = 8;

/// The regions of the workspace, in bytes.
pub(super) struct Workspace {
    /// The stationary operand, if packed.
    pub stationary: usize,
    /// Partial sums, if the depth is cut.
    pub partial: usize,
    /// First thread's streamed panels; of slices of the depth, those of A.
    pub streamed: usize,
    /// From a thread's panels of A to those of B, where threads share slices.
    pub columns: usize,
    /// Distance between the streamed panels of two threads.
    pub streamed_each: usize,
    /// First thread's block of sums that wait for the epilogue.
    pub block: usize,
    /// Distance between the blocks of two threads.
    pub block_each: usize,
    /// Elements between neighbouring rows of a block.
    pub block_ld: usize,
    /// Distance between whole workspaces of two threads, when each has one of its own.
    pub each: usize,
    pub total: usize,
}

impl Workspace {
    pub fn new(spec: &GemmSpec<'_>, plan: &ProductPlan) -> Self {
        // A last vector store may run over by less than a vector.
        let bytes = spec.element().bytes();
        let floats = |count: usize| round_up((count + plan.lanes) * bytes, REGION);
        let (a, b) = (
            plan.padded_rows(spec.m) * plan.depth,
            plan.padded_columns() * plan.depth,
        );
        let (stationary, streamed_each) = match plan.stream {
            Stream::Columns => (
                if plan.a_packed { floats(a) } else { 0 },
                if plan.b_packed {
                    floats(plan.group * plan.width() * plan.streamed_steps())
                } else {
                    0
                },
            ),
            Stream::Rows => (
                if plan.b_packed { floats(b) } else { 0 },
                if plan.a_packed {
                    floats(plan.group * plan.rows * plan.streamed_steps())
                } else {
                    0
                },
            ),
        };
        if plan.parallel == Parallel::Depth {
            let [a, b] = [plan.padded_rows(spec.m), plan.padded_columns()];
            let partial = floats(plan.slices().1 * a * b);
            let packed = |is: bool, extent: usize| if is { floats(extent * plan.chunk) } else { 0 };
            let [a, b] = [packed(plan.a_packed, a), packed(plan.b_packed, b)];
            return Self {
                stationary: 0,
                partial: 0,
                streamed: partial,
                columns: a,
                streamed_each: a + b,
                block: 0,
                block_each: 0,
                block_ld: 0,
                each: 0,
                total: partial + (a + b) * spec.threads,
            };
        }
        let partial = if plan.cuts > 1 && !plan.in_result {
            floats(plan.padded_rows(spec.m) * plan.padded_columns())
        } else {
            0
        };
        // Panels that all threads have in common lie where those of the first thread would.
        let (common, streamed_each) = match (plan.shared, plan.stream) {
            (false, _) => (0, streamed_each),
            (true, Stream::Columns) => (floats(b), 0),
            (true, Stream::Rows) => (floats(a), 0),
        };
        let shared = stationary + partial;
        let threads = if plan.parallel == Parallel::Panels {
            spec.threads
        } else {
            1
        };
        let (block_rows, block_panels) = match plan.stream {
            Stream::Columns => (
                plan.rows * if plan.tiles() { plan.part } else { 1 },
                plan.group.min(plan.column_panels),
            ),
            Stream::Rows => (
                plan.rows * plan.group.min(plan.row_panels),
                if plan.tiles() {
                    plan.part
                } else {
                    WIDE.min(plan.column_panels)
                },
            ),
        };
        // A vector more than the columns, so that rows do not fight for the same lines of L1.
        let block_ld = block_panels * plan.width() + plan.lanes;
        let block_each = if plan.in_result || plan.cuts > 1 {
            0
        } else {
            floats(block_rows * block_ld)
        };
        let block = shared + common + streamed_each * threads;
        let whole = block + block_each * threads;
        let (each, total) = match plan.parallel {
            Parallel::Batch => (whole, whole * spec.threads),
            _ => (0, whole),
        };
        Self {
            stationary: 0,
            partial: stationary,
            streamed: shared,
            columns: 0,
            streamed_each,
            block,
            block_each,
            block_ld,
            each,
            total,
        }
    }
}

/// Bytes of working memory.
pub(super) fn bytes(spec: &GemmSpec<'_>, isa: Isa) -> usize {
    match spec.batch * spec.m * spec.n {
        0 => 0,
        _ => Workspace::new(spec, &ProductPlan::new(spec, isa)).total,
    }
}
