//! Operations over ranks: processes that run the same graph at the same time, each on arguments of its own.
//!
//! Every rank runs the same collectives in the same order. The result on one rank depends on the operands
//! of all ranks, so these operations are not pure: no pass merges, duplicates or reorders them, or drops
//! them on one rank only. [`combine`] defines their results.

use std::fmt;

use crate::{DType, HostTensor, Shape, TensorType};

/// What an operation over ranks computes; `x_r` is the operand of rank `r` of `n`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CollectiveKind {
    /// Every rank gets the sum over `r` of `x_r`.
    AllReduce,
    /// Rank `r` gets the `r`-th of `n` equal blocks, along the first dimension, of that sum.
    ReduceScatter,
    /// Every rank gets the operands joined along the first dimension, in the order of ranks.
    AllGather,
    /// Every rank gets the operand of rank [`Collective::root`].
    FromRoot,
}

impl CollectiveKind {
    /// Every kind.
    pub const ALL: [Self; 4] = [
        Self::AllReduce,
        Self::ReduceScatter,
        Self::AllGather,
        Self::FromRoot,
    ];

    /// The mnemonic in the text form. (`broadcast` is the repetition of elements.)
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::FromRoot => "broadcast_from",
        }
    }

    /// The kind of that mnemonic.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether operand and result are of one type, so that one memory can serve both.
    pub const fn is_in_place(self) -> bool {
        matches!(self, Self::AllReduce | Self::FromRoot)
    }

    /// Whether the operation adds up operands.
    pub const fn reduces(self) -> bool {
        matches!(self, Self::AllReduce | Self::ReduceScatter)
    }
}

impl fmt::Display for CollectiveKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An operation over ranks.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Collective {
    /// What it computes.
    pub kind: CollectiveKind,
    /// Number of ranks, at least 1.
    pub ranks: usize,
    /// Whether a sum is divided by the number of ranks. Of floats only.
    pub mean: bool,
    /// The rank that [`CollectiveKind::FromRoot`] takes the operand of; 0 for other kinds.
    pub root: usize,
    /// Whether it is only started: [`crate::Op::CollectiveWait`] gives the complete result, and no other
    /// operation may read the unfinished one. The meaning is the same.
    pub started: bool,
}

impl Collective {
    /// An operation of this kind that is complete at once; sums are not divided, and rank 0 is the root.
    pub const fn new(kind: CollectiveKind, ranks: usize) -> Self {
        Self {
            kind,
            ranks,
            mean: false,
            root: 0,
            started: false,
        }
    }

    /// The mean over `ranks`, on every rank.
    pub const fn average(ranks: usize) -> Self {
        Self {
            mean: true,
            ..Self::new(CollectiveKind::AllReduce, ranks)
        }
    }

    /// The type of the result for an operand of type `x`; otherwise the rule that is broken.
    pub(crate) fn result(&self, x: &TensorType) -> Result<TensorType, String> {
        let Self { kind, ranks, .. } = *self;
        if ranks == 0 {
            return Err("there is at least one rank".into());
        }
        if self.root >= ranks || (self.root > 0 && kind != CollectiveKind::FromRoot) {
            return Err(format!("rank {} of {ranks} is no root of it", self.root));
        }
        if kind.reduces() && x.dtype == DType::Bool {
            return Err(format!("adds numbers, got {x}"));
        }
        if self.mean && !(kind.reduces() && x.dtype.is_float()) {
            return Err(format!("means are of floats that are added up, got {x}"));
        }
        let first = |x: &TensorType| match x.shape.rank() {
            0 => Err(format!(
                "joins and divides the first dimension, which {x} has not"
            )),
            _ => Ok(x.shape[0]),
        };
        let shape: Shape = match kind {
            CollectiveKind::AllReduce | CollectiveKind::FromRoot => x.shape.clone(),
            CollectiveKind::ReduceScatter => {
                let extent = first(x)?;
                if extent % ranks != 0 {
                    return Err(format!(
                        "{extent} elements of the first dimension do not divide among {ranks} ranks"
                    ));
                }
                x.shape.with(0, extent / ranks)
            }
            CollectiveKind::AllGather => {
                let extent = first(x)?.checked_mul(ranks);
                let extent =
                    extent.ok_or_else(|| format!("{x} of {ranks} ranks is larger than any memory"))?;
                x.shape.with(0, extent)
            }
        };
        Ok(TensorType {
            dtype: x.dtype,
            shape,
        })
    }
}

/// The results of all ranks, in the order of ranks, from their operands. Sums are computed in the order of
/// ranks, in f64 or modulo 2^64, and rounded once.
///
/// # Errors
/// If there is not one operand of one type for each rank, or the type does not fit.
pub fn combine(collective: &Collective, operands: &[HostTensor]) -> Result<Vec<HostTensor>, String> {
    let ranks = collective.ranks;
    let (Some(first), true) = (operands.first(), operands.len() == ranks) else {
        return Err(format!("{} of {ranks} ranks gave an operand", operands.len()));
    };
    if let Some(other) = operands.iter().find(|other| other.ty() != first.ty()) {
        return Err(format!("operands {} and {} differ", first.ty(), other.ty()));
    }
    let result = collective.result(first.ty())?;
    let dtype = first.ty().dtype;
    let per_rank = |of: &dyn Fn(usize) -> HostTensor| (0..ranks).map(of).collect();
    let block = result.numel();
    Ok(match collective.kind {
        CollectiveKind::FromRoot => per_rank(&|_| operands[collective.root].clone()),
        _ if dtype.is_float() => {
            let all: Vec<Vec<f64>> = operands.iter().map(HostTensor::to_f64s).collect();
            let joined = match collective.kind.reduces() {
                true => sum(&all, 0.0, |a, b| a + b),
                false => all.concat(),
            };
            let divided = joined
                .into_iter()
                .map(|x| if collective.mean { x / ranks as f64 } else { x });
            let values: Vec<f64> = divided.collect();
            per_rank(&|rank| {
                let own = own_block(collective.kind, &values, rank, block);
                HostTensor::from_floats(dtype, result.shape.clone(), own.iter().copied())
            })
        }
        _ => {
            let all: Vec<Vec<i64>> = operands.iter().map(HostTensor::to_i64s).collect();
            let values = match collective.kind.reduces() {
                true => sum(&all, 0, i64::wrapping_add),
                false => all.concat(),
            };
            per_rank(&|rank| {
                let own = own_block(collective.kind, &values, rank, block);
                HostTensor::from_ints(dtype, result.shape.clone(), own.iter().copied())
            })
        }
    })
}

/// The sums of elements at one position.
fn sum<T: Copy>(all: &[Vec<T>], zero: T, add: impl Fn(T, T) -> T) -> Vec<T> {
    let mut total = vec![zero; all[0].len()];
    for one in all {
        for (sum, &x) in total.iter_mut().zip(one) {
            *sum = add(*sum, x);
        }
    }
    total
}

/// The part of `all`, the elements of all ranks' combined operands, that rank `rank` gets.
fn own_block<T>(kind: CollectiveKind, all: &[T], rank: usize, block: usize) -> &[T] {
    match kind {
        CollectiveKind::ReduceScatter => &all[rank * block..(rank + 1) * block],
        _ => all,
    }
}
