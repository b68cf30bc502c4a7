//! Random well-typed graphs and arguments for them: the raw material of differential tests (feature
//! `testing`).
//!
//! [`random_graph`] is a plain function of a seed; [`graphs`] is the same as a proptest strategy, which
//! shrinks by taking fewer steps (a graph of fewer steps is a prefix of the larger one). Every primitive
//! occurs, with small odd shapes, zero-sized and rank-0 tensors included.
//!
//! The graphs are *tame*: on the arguments that [`random_arguments`] makes, every executor that follows the
//! rules of [`crate::op`] must agree with the interpreter to within [`RandomGraph::tolerances`]. To that end
//! the generator keeps for each float value a bound of its size and a first-order bound of its rounding error
//! (`build`). Functions that amplify errors without limit (a logarithm near 0) get operands moved away from
//! there, and functions that are not continuous (comparisons, rounding, positions of extremes) get only
//! values that are exact: arguments and what moves or selects among them.

mod build;
mod kernels;
mod rng;
mod simple;

use std::ops::Range;

use proptest::prelude::{Strategy, any};

use crate::op::AttentionDims;
use crate::{DType, Graph, HostTensor, Op, Scalar, TensorType};
use build::Builder;

pub use rng::Rng;

/// A kind of primitive; see [`GraphConfig::families`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Family {
    /// Unary, binary, compare, select, cast.
    Pointwise,
    /// Random numbers.
    Random,
    /// Reductions, positions of extremes, running reductions.
    Reduce,
    /// Shapes, slices, padding, joining.
    Movement,
    /// Gather, scatter and their whole-slice forms.
    Index,
    /// Matrix products.
    Dot,
    /// Convolutions and their gradients.
    Conv,
    /// Pooling and its gradients.
    Pool,
    /// Attention and its gradient.
    Attention,
    /// Sort and top-k.
    Sort,
    /// Operations over ranks; only what connects ranks runs them, so no default configuration has them.
    Collective,
    /// Operations kept whole; no executor here runs them, so no default configuration has them.
    Extern,
}

impl Family {
    /// Every family that executors run.
    pub const ALL: [Family; 10] = [
        Family::Pointwise,
        Family::Random,
        Family::Reduce,
        Family::Movement,
        Family::Index,
        Family::Dot,
        Family::Conv,
        Family::Pool,
        Family::Attention,
        Family::Sort,
    ];

    /// The family of an operation; none for arguments, constants and iota.
    pub fn of(op: &Op) -> Option<Family> {
        Some(match op {
            Op::Parameter { .. } | Op::Scalar { .. } | Op::Constant { .. } | Op::Iota { .. } => return None,
            Op::Unary(_) | Op::Binary(_) | Op::Compare(_) | Op::Select | Op::Cast(_) => Family::Pointwise,
            Op::Random { .. } => Family::Random,
            Op::Reduce { .. } | Op::ArgReduce { .. } | Op::Cumulative { .. } => Family::Reduce,
            Op::Gather { .. } | Op::Scatter { .. } | Op::IndexSelect { .. } | Op::IndexPut { .. } => {
                Family::Index
            }
            Op::DotGeneral(_) => Family::Dot,
            Op::Conv(_) | Op::ConvInputGrad { .. } | Op::ConvWeightGrad { .. } => Family::Conv,
            Op::MaxPool(_)
            | Op::MaxPoolWithIndices { .. }
            | Op::MaxPoolGrad { .. }
            | Op::AvgPool { .. }
            | Op::AvgPoolGrad { .. } => Family::Pool,
            Op::Attention(_) | Op::AttentionGrad(_) => Family::Attention,
            Op::Sort { .. } | Op::TopK { .. } => Family::Sort,
            Op::Collective(_) | Op::CollectiveWait => Family::Collective,
            Op::Extern(_) => Family::Extern,
            _ => Family::Movement,
        })
    }
}

/// What random graphs look like.
#[derive(Clone, Debug)]
pub struct GraphConfig {
    /// Steps of the generator; each adds one operation and what its operands need. Default 12.
    pub steps: usize,
    /// No tensor made on purpose is larger, in elements. Default 120.
    pub max_elements: usize,
    /// Which operations occur besides constants, pointwise helpers and reshapes, which always may. Default
    /// [`Family::ALL`].
    pub families: Vec<Family>,
    /// Float types, each as likely as it is often listed. Default f32 three times, f64 once.
    pub floats: Vec<DType>,
    /// Integer types. Default i64, i32, u8.
    pub ints: Vec<DType>,
    /// Whether extents of 0 occur. Default true.
    pub zero_sized: bool,
    /// Whether operations belong together, as a model's do, so that schedulers find much to fuse: a few
    /// extents, operands that exist wherever there are any, and parts of the step in order. Default false:
    /// each operation is of any part, and often has operands of its own.
    pub together: bool,
}

impl Default for GraphConfig {
    fn default() -> Self {
        Self {
            steps: 12,
            max_elements: 120,
            families: Family::ALL.to_vec(),
            floats: vec![DType::F32, DType::F32, DType::F32, DType::F64],
            ints: vec![DType::I64, DType::I32, DType::U8],
            zero_sized: true,
            together: false,
        }
    }
}

impl GraphConfig {
    /// The default with operations of these families.
    pub fn of(families: &[Family]) -> Self {
        Self {
            families: families.to_vec(),
            ..Self::default()
        }
    }

    /// Operations of every family that share their operands, as a step's do: many end up in one kernel. No
    /// tensor made on purpose has more elements than these.
    pub fn of_a_step(max_elements: usize) -> Self {
        Self {
            steps: 40,
            max_elements,
            floats: vec![DType::F32, DType::F32, DType::F32, DType::BF16],
            together: true,
            ..Self::default()
        }
    }
}

/// A graph and how closely an executor must follow it.
#[derive(Clone, Debug)]
pub struct RandomGraph {
    /// The graph. Its outputs are all values that nothing else uses.
    pub graph: Graph,
    /// For each output, the absolute difference from [`crate::interpret_f64`] that rounding may explain in
    /// any element; 0 where the result is exact (integers, moved arguments).
    pub tolerances: Vec<f64>,
}

/// `seeds`, moved by `KILN_TEST_SEED` where that is set: other random graphs than every run of a test draws.
///
/// # Panics
/// Panics if the variable is not a number.
pub fn seeds(seeds: Range<u64>) -> Range<u64> {
    let by: u64 = match std::env::var("KILN_TEST_SEED") {
        Ok(text) => text.parse().expect("KILN_TEST_SEED is a number"),
        Err(_) => 0,
    };
    seeds.start + by..seeds.end + by
}

/// A random graph, the same for the same seed and configuration.
pub fn random_graph(seed: u64, config: &GraphConfig) -> RandomGraph {
    let mut builder = Builder::new(seed, config);
    for _ in 0..config.steps {
        builder.step();
    }
    builder.finish()
}

/// Random graphs of up to `config.steps` steps.
pub fn graphs(config: GraphConfig) -> impl Strategy<Value = RandomGraph> {
    (any::<u64>(), 1..=config.steps.max(1)).prop_map(move |(seed, steps)| {
        random_graph(
            seed,
            &GraphConfig {
                steps,
                ..config.clone()
            },
        )
    })
}

/// Every combination of what varies between attentions.
pub fn every_attention() -> impl Iterator<Item = AttentionDims> {
    (0..128u8)
        .map(|bits| AttentionDims {
            causal: bits & 1 != 0,
            mask: bits & 2 != 0,
            hidden: bits & 4 != 0,
            mask_last: bits & 8 != 0,
            dropout: bits & 16 != 0,
            drop_scores: bits & 32 != 0,
            safe: bits & 64 != 0,
        })
        .filter(AttentionDims::is_consistent)
}

/// A tensor of exact small numbers: multiples of 1/16 in `[-2, 2]` for floats (exact in every float type,
/// with ties), -9 to 9 for signed integers, 0 to 9 for unsigned ones.
pub fn random_tensor(ty: &TensorType, seed: u64) -> HostTensor {
    let mut rng = Rng::new(seed);
    let count = ty.numel();
    let shape = ty.shape.clone();
    match ty.dtype {
        DType::Bool => HostTensor::from_ints(DType::Bool, shape, (0..count).map(|_| rng.below(2) as i64)),
        dtype if dtype.is_float() => HostTensor::from_floats(
            dtype,
            shape,
            (0..count).map(|_| rng.below(65) as f64 / 16.0 - 2.0),
        ),
        dtype if dtype.is_unsigned_int() => {
            HostTensor::from_ints(dtype, shape, (0..count).map(|_| rng.below(10) as i64))
        }
        dtype => HostTensor::from_ints(dtype, shape, (0..count).map(|_| rng.below(19) as i64 - 9)),
    }
}

/// [`random_arguments`] in which some floats are NaN or -0. The tolerances of a tame graph hold here too, for
/// an executor that propagates NaN as the rules say. (Not for infinities: the rounding error of a factor near
/// 0 decides the sign of its product with one.)
pub fn special_arguments(graph: &Graph, seed: u64) -> (Vec<HostTensor>, Vec<Scalar>) {
    let (tensors, scalars) = random_arguments(graph, seed);
    let mut rng = Rng::new(!seed);
    let tensors = tensors.into_iter().map(|tensor| {
        let TensorType { dtype, shape } = tensor.ty().clone();
        if !dtype.is_float() {
            return tensor;
        }
        let values = tensor.to_f64s().into_iter().map(|value| match rng.below(24) {
            0 => f64::NAN,
            1 => -0.0,
            _ => value,
        });
        HostTensor::from_floats(dtype, shape, values)
    });
    (tensors.collect(), scalars)
}

/// Arguments for any graph, [`random_tensor`]s and scalars of the same kind.
pub fn random_arguments(graph: &Graph, seed: u64) -> (Vec<HostTensor>, Vec<Scalar>) {
    let mut rng = Rng::new(seed);
    let tensors = graph
        .parameters()
        .iter()
        .map(|&value| random_tensor(graph.ty(value), rng.draw()))
        .collect();
    let scalars = graph
        .scalars()
        .iter()
        .map(|&value| match graph.dtype(value) {
            DType::Bool => Scalar::Bool(rng.below(2) == 1),
            dtype if dtype.is_float() => Scalar::Float(rng.below(65) as f64 / 16.0 - 2.0),
            dtype if dtype.is_unsigned_int() => Scalar::UInt(rng.below(10)),
            _ => Scalar::Int(rng.below(19) as i64 - 9),
        })
        .collect();
    (tensors, scalars)
}

/// Where `actual` differs from the reference that [`crate::interpret_f64`] gave by more than `tolerance`: a
/// sentence for an assertion, or none. NaN equals NaN, infinities equal themselves; element types may differ.
pub fn difference(actual: &HostTensor, reference: &HostTensor, tolerance: f64) -> Option<String> {
    if actual.ty().shape != reference.ty().shape {
        return Some(format!("{} has not the shape of {}", actual.ty(), reference.ty()));
    }
    if !actual.ty().dtype.is_float() {
        let (a, b) = (actual.to_i64s(), reference.to_i64s());
        let at = a.iter().zip(&b).position(|(a, b)| a != b)?;
        return Some(format!(
            "element {at} of {} is {}, expected {}",
            actual.ty(),
            a[at],
            b[at]
        ));
    }
    let (a, b) = (actual.to_f64s(), reference.to_f64s());
    let agree = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= tolerance;
    let at = a.iter().zip(&b).position(|(&a, &b)| !agree(a, b))?;
    Some(format!(
        "element {at} of {} is {}, expected {} within {tolerance:e}",
        actual.ty(),
        a[at],
        b[at]
    ))
}
