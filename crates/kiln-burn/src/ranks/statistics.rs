//! Synchronised batch norm: statistics of the examples of all ranks.
//!
//! Burn's batch norm is a sequence of tensor operations like any other, and so is its gradient. While a loss is
//! computed and differentiated under [`synchronised`], the operations pass by here, and two of them become two:
//!
//! ```text
//!   forward                                          backward, by burn-autodiff
//!   rows  = reshape (swap_dims x 0 1), [C, F]        value = mul_scalar (ones [C, F]) (1 / F)
//!   y     = mean_dim rows 1                          grad  = sum_dim dy 1
//!   ...   = reshape y, [1, C, 1, ..]                 d rows = mul value grad
//!
//!   y     = mean over ranks (mean_dim rows 1)        d rows = mul value (mean over ranks grad)
//! ```
//!
//! Every rank has as many examples, so the mean of the means is the mean of all examples; the variance is the mean of
//! squared distances from that mean, and the same holds for it. A statistic of one rank goes into the loss of every
//! rank: its gradient is the sum of theirs, of which each rank, whose gradients are averaged afterwards, takes the
//! mean.
//!
//! A mean of rows is taken for a statistic only if it also goes into a running statistic: `old + y * momentum`. What
//! cannot be told apart is refused ([`synchronised`]), and nothing is run.

use std::cell::RefCell;

use burn_backend::Shape;
use burn_ir::{
    BaseOperationIr, BinaryOpIr, CustomOpIr, NumericOperationIr, OperationIr, ScalarIr, TensorId, TensorIr,
    TensorStatus,
};
use rustc_hash::FxHashMap;

use super::MEAN;

/// What is known of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Images with channels first.
    Swapped,
    /// The elements of each channel as a row.
    Rows,
    /// A statistic, by its number.
    Statistic(usize),
    /// A statistic times a number.
    Weighted(usize),
    /// Ones in this shape.
    Ones(usize, usize),
    /// Ones divided by the length of a row.
    Shares(usize, usize),
    /// Sums of rows of one element.
    Sums,
}

/// The statistics of a step, so far.
#[derive(Default, Debug)]
struct Statistics {
    kinds: FxHashMap<TensorId, Kind>,
    /// For each statistic, whether it has gone into a running one.
    runs: Vec<bool>,
    /// For each shape of rows: statistics, other means, and gradients of means.
    counts: FxHashMap<(usize, usize), [usize; 3]>,
}

thread_local! {
    static UNDER_WAY: RefCell<Option<Statistics>> = const { RefCell::new(None) };
}

/// The result of `loss`, which computes a loss and its gradients, with the statistics of its batch norms taken over
/// all ranks. The model has `expected` running statistics.
///
/// # Errors
///
/// What keeps its batch norms from being recognised, in words.
pub fn synchronised<R>(expected: usize, loss: impl FnOnce() -> R) -> Result<R, String> {
    /// Ends it also if the program panics.
    struct Ended;
    impl Drop for Ended {
        fn drop(&mut self) {
            UNDER_WAY.with_borrow_mut(|statistics| *statistics = None);
        }
    }
    UNDER_WAY.with_borrow_mut(|statistics| *statistics = Some(Statistics::default()));
    let ended = Ended;
    let result = loss();
    let statistics = UNDER_WAY.with_borrow_mut(Option::take);
    drop(ended);
    match statistics {
        Some(statistics) => statistics.check(expected).map(|()| result),
        None => Err("another step was recorded meanwhile".into()),
    }
}

/// The operations that run in place of `operation`, in order; none if it stays as it is. `new_id` gives ids.
pub(crate) fn replaced(
    operation: &OperationIr,
    new_id: impl FnOnce() -> TensorId,
) -> Option<[OperationIr; 2]> {
    UNDER_WAY
        .try_with(|statistics| statistics.borrow_mut().as_mut()?.pass(operation, new_id))
        .ok()
        .flatten()
}

impl Statistics {
    fn kind(&self, tensor: &TensorIr) -> Option<Kind> {
        self.kinds.get(&tensor.id).copied()
    }

    fn note(&mut self, tensor: &TensorIr, kind: Kind) {
        self.kinds.insert(tensor.id, kind);
    }

    fn pass(
        &mut self,
        operation: &OperationIr,
        new_id: impl FnOnce() -> TensorId,
    ) -> Option<[OperationIr; 2]> {
        use NumericOperationIr as N;
        match operation {
            OperationIr::BaseFloat(operation) => self.pass_base(operation),
            OperationIr::NumericFloat(dtype, N::MeanDim(mean)) => {
                let shape = extents(&mean.input.shape).filter(|_| mean.axis == 1)?;
                let is_statistic = self.is_rows(&mean.input);
                self.counts.entry(shape).or_default()[usize::from(!is_statistic)] += 1;
                if !is_statistic {
                    return None;
                }
                self.note(&mean.out, Kind::Statistic(self.runs.len()));
                self.runs.push(false);
                let mut own = mean.clone();
                own.out.id = new_id();
                let over_ranks = mean_over_ranks(consumed(&own.out), mean.out.clone());
                return Some([OperationIr::NumericFloat(*dtype, N::MeanDim(own)), over_ranks]);
            }
            OperationIr::NumericFloat(dtype, N::Mul(product)) => {
                let Some(Kind::Shares(channels, length)) = self.kind(&product.lhs) else {
                    return None;
                };
                if self.kind(&product.rhs) != Some(Kind::Sums) {
                    return None;
                }
                self.counts.entry((channels, length)).or_default()[2] += 1;
                let sums = product.rhs.clone();
                let mut summed = sums.clone();
                summed.id = new_id();
                summed.status = TensorStatus::NotInit;
                let product = BinaryOpIr {
                    rhs: consumed(&summed),
                    ..product.clone()
                };
                let over_ranks = mean_over_ranks(sums, summed);
                return Some([over_ranks, OperationIr::NumericFloat(*dtype, N::Mul(product))]);
            }
            OperationIr::NumericFloat(_, operation) => self.pass_numeric(operation),
            _ => {}
        }
        None
    }

    /// Operations that keep the elements, or make them.
    fn pass_base(&mut self, operation: &BaseOperationIr) {
        match operation {
            BaseOperationIr::SwapDims(swap)
                if (swap.dim1.min(swap.dim2), swap.dim1.max(swap.dim2)) == (0, 1) =>
            {
                self.note(&swap.out, Kind::Swapped);
            }
            BaseOperationIr::Reshape(reshape) => match self.kind(&reshape.input) {
                Some(Kind::Swapped)
                    if extents(&reshape.out.shape)
                        .is_some_and(|(rows, _)| rows == reshape.input.shape[0]) =>
                {
                    self.note(&reshape.out, Kind::Rows);
                }
                Some(kind @ (Kind::Statistic(_) | Kind::Weighted(_))) => self.note(&reshape.out, kind),
                _ => {}
            },
            BaseOperationIr::Ones(ones) => {
                if let Some((channels, length)) = extents(&ones.out.shape) {
                    self.note(&ones.out, Kind::Ones(channels, length));
                }
            }
            _ => {}
        }
    }

    fn pass_numeric(&mut self, operation: &NumericOperationIr) {
        match operation {
            NumericOperationIr::MulScalar(product) => match (self.kind(&product.lhs), product.rhs) {
                (Some(Kind::Ones(channels, length)), ScalarIr::Float(factor))
                    if (factor * length as f64 - 1.0).abs() < 1e-6 =>
                {
                    self.note(&product.out, Kind::Shares(channels, length));
                }
                (Some(Kind::Statistic(number)), _) => self.note(&product.out, Kind::Weighted(number)),
                _ => {}
            },
            NumericOperationIr::SumDim(sum)
                if sum.axis == 1 && extents(&sum.input.shape).is_some_and(|(_, length)| length == 1) =>
            {
                self.note(&sum.out, Kind::Sums);
            }
            NumericOperationIr::Add(sum) => {
                for side in [&sum.lhs, &sum.rhs] {
                    if let Some(Kind::Weighted(number)) = self.kind(side) {
                        self.runs[number] = true;
                    }
                }
            }
            _ => {}
        }
    }

    fn is_rows(&self, tensor: &TensorIr) -> bool {
        match self.kind(tensor) {
            Some(Kind::Rows) => true,
            // A batch of vectors has its rows at once.
            Some(Kind::Swapped) => tensor.shape.num_dims() == 2,
            _ => false,
        }
    }

    fn check(&self, expected: usize) -> Result<(), String> {
        if self.runs.contains(&false) {
            return Err("it takes means of channels that go into no running statistic".into());
        }
        if self.runs.len() < expected {
            return Err(format!(
                "the model has {expected} running statistics, and {} were computed by operations of Burn's batch norm",
                self.runs.len()
            ));
        }
        for ((channels, length), [statistics, others, gradients]) in &self.counts {
            if *statistics > 0 && *others > 0 {
                return Err(format!(
                    "it takes means of the same shape, [{channels}, {length}], that are no statistics of a batch norm"
                ));
            }
            if *statistics > 0 && gradients > statistics {
                return Err(format!(
                    "{statistics} statistics of shape [{channels}, {length}] have {gradients} gradients"
                ));
            }
        }
        Ok(())
    }
}

/// The two extents of a matrix.
fn extents(shape: &Shape) -> Option<(usize, usize)> {
    (shape.num_dims() == 2).then(|| (shape[0], shape[1]))
}

/// `tensor` where it is used for the last time.
fn consumed(tensor: &TensorIr) -> TensorIr {
    TensorIr {
        status: TensorStatus::ReadWrite,
        ..tensor.clone()
    }
}

fn mean_over_ranks(input: TensorIr, output: TensorIr) -> OperationIr {
    OperationIr::Custom(CustomOpIr {
        id: MEAN.clone(),
        inputs: vec![input],
        outputs: vec![output],
    })
}
