//! The numerics check: compares a step with a reference backend on the same inputs, and finds the first
//! place where they differ.
//!
//! The step runs as always; then the reference runs the recorded graph on copies of the inputs, and outputs
//! are compared. If one differs, the executable is asked to find out where ([`Executable::locate`]): compiled
//! code compares the memory of each kernel, while it runs, with the reference's values of the same graph.
//!
//! Two numbers agree if they differ by at most the tolerance times the largest magnitude in the reference's
//! tensor: rounding grows with the numbers that were added up, not with their sum. Integers and truth values
//! agree if they are equal. NaN agrees with NaN.
//!
//! Some results say nothing in their last digits. The gradient of a bias before batch norm, or of the keys'
//! bias in attention, is zero but for rounding, and an optimizer that divides a gradient by its size moves that
//! bias by rounding alone. When an output differs, the reference therefore also runs with each value that it
//! computes moved by as much as the step rounds ([`rounded`]). Where that changes an output far more than it
//! moved any value, a difference of that size agrees.
//!
//! Under autocast the step rounds to 16 bits where the reference does not, at every product of a chain, and an
//! optimizer may divide small numbers by each other: numbers agree then if they differ by at most
//! [`allowed_by_autocast`]. A tensor that is itself stored in 16 bits may be off by one unit in the last place.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kiln_graph::op::{BinaryOp, CompareOp, UnaryOp};
use kiln_graph::{DType, Graph, HostTensor, NodeData, Op, Provenance, Rewriter, TypeError, Value};

use super::minify::Suspect;
use super::{Executable, ExecuteError, Setting, prepare};
use crate::options::{CompileBackend, CompileOptions, NumericsCheck};
use crate::storage::Storage;

/// The place where a step and its reference differ.
#[derive(Clone, PartialEq, Debug)]
pub struct Parting {
    /// The kernel, as number and name; none if the step consists of single operations.
    pub kernel: Option<String>,
    /// The primitive that made the value.
    pub op: String,
    /// The recorded Burn operation, if known.
    pub operation: Option<String>,
    /// The forward operation whose gradient it belongs to, by Burn's name, if it is one; the line is that
    /// operation's.
    pub gradient_of: Option<String>,
    /// `file:line` of the user's call, if known.
    pub location: Option<String>,
    /// Type and shape of the value.
    pub ty: String,
    /// The first element that differs, and in how many places the two tensors do.
    pub element: (usize, usize),
    /// The reference's element.
    pub expected: f64,
    /// The step's element.
    pub found: f64,
}

impl fmt::Display for Parting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(kernel) = &self.kernel {
            write!(f, "kernel {kernel}, ")?;
        }
        write!(f, "`{}`", self.op)?;
        if let Some(operation) = &self.operation {
            write!(f, " of {operation}")?;
        }
        if let Some(forward) = &self.gradient_of {
            write!(f, ", gradient of `{forward}`")?;
        }
        if let Some(location) = &self.location {
            write!(f, " at {location}")?;
        }
        let (first, count) = self.element;
        write!(
            f,
            ": {count} elements of {} differ, the first at {first}: {} instead of {}",
            self.ty, self.found, self.expected
        )
    }
}

impl Parting {
    /// The difference at the first result of `node`, as `difference` describes it.
    pub fn at(graph: &Graph, node: &NodeData, difference: Difference) -> Self {
        let text = |text: &Option<Arc<str>>| text.as_deref().map(str::to_owned);
        Self {
            kernel: None,
            op: match &node.op {
                Op::Extern(op) => op.name.clone(),
                op => op.name().to_owned(),
            },
            operation: text(&node.provenance.operation),
            gradient_of: text(&node.provenance.gradient_of),
            location: text(&node.provenance.location),
            ty: node
                .outputs
                .first()
                .map_or_else(String::new, |&value| graph.ty(value).to_string()),
            element: (difference.first, difference.count),
            expected: difference.expected,
            found: difference.found,
        }
    }
}

/// How two tensors differ.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Difference {
    /// The first element that does.
    pub first: usize,
    /// How many do.
    pub count: usize,
    /// The reference's element.
    pub expected: f64,
    /// The other.
    pub found: f64,
}

/// How `found` differs from `expected` beyond `tolerance`; none if they agree.
fn difference(expected: &HostTensor, found: &HostTensor, tolerance: f64) -> Option<Difference> {
    let (expected_values, found_values) = (expected.to_f64s(), found.to_f64s());
    let exact = !expected.ty().dtype.is_float();
    let largest = expected_values
        .iter()
        .filter(|x| x.is_finite())
        .fold(0.0f64, |most, x| most.max(x.abs()));
    let last_place = match expected.ty().dtype {
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        _ => 0.0,
    };
    let allowed = if exact {
        0.0
    } else {
        tolerance.max(last_place) * largest
    };
    let agree = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= allowed;
    let mut differing = expected_values
        .iter()
        .zip(&found_values)
        .enumerate()
        .filter(|(_, (a, b))| !agree(**a, **b));
    let (first, (&expected, &found)) = differing.next()?;
    Some(Difference {
        first,
        count: 1 + differing.count(),
        expected,
        found,
    })
}

/// How far a step that autocast rounds to `dtype` may be from one of `f32`, relative to the largest magnitude of a
/// tensor: 32 times the rounding of one operand, `2^-9` for `bf16` and `2^-12` for `f16`.
fn allowed_by_autocast(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-4),
        DType::F16 => 2f64.powi(-7),
        _ => 0.0,
    }
}

/// The rounding of a number of `dtype`, relative to that of one of `bf16`. A sum in `f32` rounds at each of
/// its terms and not once, as a value rounded to `bf16` does: for it this is 8 times as much.
fn rounding_over_bf16(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0,
        DType::F16 => 2f64.powi(-3),
        _ => 2f64.powi(-13),
    }
}

/// Numbers above this are not moved: they may round to infinity, and their neighbours stand for it.
const LARGEST_MOVED: f64 = 1e30;

/// The graph with every value of `f32` that it computes moved towards what `bf16` makes of it, by the part
/// `share` of the way. Values that are moved in memory alone are what they were.
fn rounded(graph: &Graph, share: f64) -> Result<Graph, TypeError> {
    let mut new = Rewriter::new(graph);
    for (id, node) in graph.nodes() {
        new.copy(id)?;
        let is_computed = !node.op.is_movement()
            && !matches!(
                node.op,
                Op::Parameter { .. } | Op::Scalar { .. } | Op::Constant { .. } | Op::Random { .. }
            );
        let values = node.outputs.iter().copied();
        for value in values.filter(|&value| is_computed && graph.ty(value).dtype == DType::F32) {
            let whole = new.map(value);
            let moved = moved(&mut new.graph, whole, share, &node.provenance)?;
            new.replace(value, moved);
        }
    }
    Ok(new.finish())
}

/// `x + share * (bf16(x) - x)` where `x` is no larger than [`LARGEST_MOVED`].
fn moved(graph: &mut Graph, x: Value, share: f64, p: &Provenance) -> Result<Value, TypeError> {
    let ty = graph.ty(x).clone();
    let half = graph.cast(x, DType::BF16, p)?;
    let half = graph.cast(half, DType::F32, p)?;
    let way = graph.binary(BinaryOp::Sub, half, x, p)?;
    let share = graph.full(share, &ty, p)?;
    let way = graph.binary(BinaryOp::Mul, way, share, p)?;
    let there = graph.binary(BinaryOp::Add, x, way, p)?;
    let size = graph.unary(UnaryOp::Abs, x, p)?;
    let largest = graph.full(LARGEST_MOVED, &ty, p)?;
    let moves = graph.compare(CompareOp::Lt, size, largest, p)?;
    graph.add(Op::Select, &[moves, there, x], p)
}

/// By how much rounding must change a tensor for that to explain a difference, relative to its largest magnitude
/// and to the share of [`rounded`]: 256 times what it moves a value, `2^-9` of it at most.
const AMPLIFIED: f64 = 0.5;

/// The most that is asked where the share is large: a tensor whose every digit is rounding.
const DROWNED: f64 = 1.0 / 16.0;

/// How much larger than the change by rounding a difference may be that it explains: sums of many terms round at each
/// of them.
const EXPLAINED: f64 = 32.0;

/// Whether rounding changes a tensor so much that it explains how far `found` is from it. `rounded` is what the
/// reference makes of it with all values moved by the share `share`.
fn is_noise(expected: &HostTensor, found: &HostTensor, rounded: &HostTensor, share: f64) -> bool {
    if !expected.ty().dtype.is_float() {
        return false;
    }
    let expected = expected.to_f64s();
    let (noise, distance) = (
        Distance::between(&expected, rounded),
        Distance::between(&expected, found),
    );
    let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let is_amplified = noise.furthest >= largest * (AMPLIFIED * share).min(DROWNED);
    is_amplified
        && noise.furthest.is_finite()
        && distance.furthest <= EXPLAINED * noise.furthest
        && distance.squares <= EXPLAINED.powi(2) * noise.squares
}

/// How far two tensors are from each other. A NaN is no distance: it makes the whole infinite.
struct Distance {
    /// The largest difference of two elements.
    furthest: f64,
    /// The sum of the squares of all differences: few elements that rounding changes do not explain that many differ.
    squares: f64,
}

impl Distance {
    fn between(expected: &[f64], other: &HostTensor) -> Self {
        let mut distance = Self {
            furthest: 0.0,
            squares: 0.0,
        };
        for (a, b) in expected.iter().zip(other.to_f64s()) {
            let apart = match (a - b).abs() {
                apart if apart.is_nan() => f64::INFINITY,
                apart => apart,
            };
            distance.furthest = distance.furthest.max(apart);
            distance.squares += apart * apart;
        }
        distance
    }
}

/// Compares the first runs of a step with a reference.
pub struct Checker {
    check: NumericsCheck,
    /// The rounding of the step over that of `bf16`.
    rounding: f64,
    options: CompileOptions,
    reference: Box<dyn Executable>,
    /// Backend and GPU of the step.
    of: (CompileBackend, usize),
    done: AtomicU64,
}

impl Checker {
    /// A check of the step that runs `graph` on `backend`, if the options ask for one.
    ///
    /// # Errors
    ///
    /// If the reference backend cannot take the graph.
    pub fn new(
        graph: &Arc<Graph>,
        backend: CompileBackend,
        gpu: usize,
        options: &CompileOptions,
    ) -> Result<Option<Self>, ExecuteError> {
        let Some(check) = options.check else {
            return Ok(None);
        };
        let (reference, _) = prepare(check.backend, 0, graph.clone(), options, Setting::default())?;
        // A reference that compiles rounds as the step does.
        let rounds = backend.compiles() && !check.backend.compiles();
        let autocast = super::autocast(options)?.filter(|_| rounds);
        let allowed = autocast.map_or(0.0, allowed_by_autocast);
        let check = NumericsCheck {
            tolerance: check.tolerance.max(allowed),
            ..check
        };
        Ok(Some(Self {
            check,
            rounding: rounding_over_bf16(autocast.unwrap_or(DType::F32)),
            options: options.clone(),
            reference,
            of: (backend, gpu),
            done: AtomicU64::new(0),
        }))
    }

    /// Whether the next run is to be checked.
    pub fn is_due(&self) -> bool {
        self.done.load(Ordering::Relaxed) < self.check.steps
    }

    /// Copies of the inputs, if this run is to be checked: the step may overwrite what it is given.
    pub fn copy(&self, inputs: &[Storage]) -> Option<Vec<Storage>> {
        let due = self.done.fetch_add(1, Ordering::Relaxed) < self.check.steps;
        due.then(|| inputs.to_vec())
    }

    /// Compares the outputs of a run of `executable` on `inputs` with the reference's.
    ///
    /// # Errors
    ///
    /// [`ExecuteError::Parted`] if they differ, with the first place where they do; errors of the reference.
    pub fn compare(
        &self,
        executable: &dyn Executable,
        graph: &Graph,
        inputs: &[Storage],
        scalars: &[u64],
        outputs: &[Storage],
    ) -> Result<(), ExecuteError> {
        let expected = self.reference.run(inputs.to_vec(), scalars)?;
        let tolerance = self.check.tolerance;
        let differs = |(expected, found): (&Storage, &Storage)| {
            let tensors = expected.to_host_tensor().zip(found.to_host_tensor());
            tensors.is_some_and(|(expected, found)| difference(&expected, &found, tolerance).is_some())
        };
        if !expected.iter().zip(outputs).any(differs) {
            return Ok(());
        }
        let reference = Reference {
            backend: self.check.backend,
            options: &self.options,
            tolerance,
            rounding: self.rounding,
            inputs,
            scalars,
        };
        let values = Values {
            rounded: reference.rounded(graph),
            expected,
            tolerance,
            rounding: self.rounding,
        };
        let differs = |(index, found): (usize, &Storage)| {
            let difference = values.difference(index, &found.to_host_tensor()?)?;
            Some((index, difference))
        };
        let Some((index, difference)) = outputs.iter().enumerate().find_map(differs) else {
            return Ok(());
        };
        let located = executable.locate(&reference)?;
        // Only the output itself is known, so the place is the node that makes it.
        let node = graph.def(graph.outputs[index].value);
        let parted = ExecuteError::Parted {
            reference: self.check.backend,
            output: index,
            parting: Box::new(located.unwrap_or_else(|| Parting::at(graph, node, difference))),
        };
        let suspect = Suspect {
            graph,
            backend: self.of.0,
            gpu: self.of.1,
            options: &self.options,
        };
        Err(suspect.minified(parted))
    }
}

/// The reference of a search for the first difference.
pub struct Reference<'a> {
    /// The reference backend.
    pub backend: CompileBackend,
    /// Its options.
    pub options: &'a CompileOptions,
    /// The tolerance of the comparison.
    pub tolerance: f64,
    /// The rounding of the step over that of `bf16`.
    pub rounding: f64,
    /// The tensors the step was given.
    pub inputs: &'a [Storage],
    /// Its runtime scalars.
    pub scalars: &'a [u64],
}

impl Reference<'_> {
    /// The values of the outputs of `graph`.
    ///
    /// # Errors
    ///
    /// Those of the reference backend.
    pub fn values(&self, graph: Graph) -> Result<Values, ExecuteError> {
        let rounded = self.rounded(&graph);
        Ok(Values {
            expected: self.run(graph)?,
            rounded,
            tolerance: self.tolerance,
            rounding: self.rounding,
        })
    }

    fn run(&self, graph: Graph) -> Result<Vec<Storage>, ExecuteError> {
        let (reference, _) = prepare(self.backend, 0, Arc::new(graph), self.options, Setting::default())?;
        reference.run(self.inputs.to_vec(), self.scalars)
    }

    /// The outputs of `graph` with all values moved by rounding; none if it cannot run so. What ranks do together is
    /// done once.
    fn rounded(&self, graph: &Graph) -> Option<Vec<Storage>> {
        let mut nodes = graph.nodes();
        if nodes.any(|(_, node)| matches!(node.op, Op::Collective(_))) {
            return None;
        }
        self.run(rounded(graph, self.rounding).ok()?).ok()
    }

    /// The first node whose value on `backend` is not the reference's: both run `graph` with every value as
    /// an output.
    ///
    /// # Errors
    ///
    /// Those of the backends.
    pub fn first_node(
        &self,
        graph: &Graph,
        backend: CompileBackend,
    ) -> Result<Option<Parting>, ExecuteError> {
        let mut all = graph.clone();
        all.outputs.clear();
        for (_, node) in graph.nodes() {
            node.outputs.iter().for_each(|&value| all.output(value, None));
        }
        let nodes: Vec<&NodeData> = all.outputs.iter().map(|output| graph.def(output.value)).collect();
        let (own, _) = prepare(
            backend,
            0,
            Arc::new(all.clone()),
            self.options,
            Setting::default(),
        )?;
        let found = own.run(self.inputs.to_vec(), self.scalars)?;
        let values = self.values(all)?;
        let parting = found
            .iter()
            .zip(nodes)
            .enumerate()
            .find_map(|(index, (found, node))| {
                let difference = values.difference(index, &found.to_host_tensor()?)?;
                Some(Parting::at(graph, node, difference))
            });
        Ok(parting)
    }
}

/// What a reference gives for the outputs of a graph.
pub struct Values {
    expected: Vec<Storage>,
    /// The same with all values moved by rounding, if that could be had.
    rounded: Option<Vec<Storage>>,
    tolerance: f64,
    rounding: f64,
}

impl Values {
    /// How `found` differs from output `index` by more than tolerance and rounding explain; none if it agrees, or
    /// if there are no numbers to compare.
    pub fn difference(&self, index: usize, found: &HostTensor) -> Option<Difference> {
        let expected = self.expected[index].to_host_tensor()?;
        let difference = difference(&expected, found, self.tolerance)?;
        let rounded = self
            .rounded
            .as_ref()
            .and_then(|rounded| rounded[index].to_host_tensor());
        let is_noise = rounded.is_some_and(|rounded| is_noise(&expected, found, &rounded, self.rounding));
        (!is_noise).then_some(difference)
    }
}

#[cfg(test)]
mod tests {
    use kiln_graph::TensorType;

    use super::*;

    #[test]
    fn noise_explains_differences_of_its_own_size_alone() {
        let tensor =
            |values: &[f64]| HostTensor::from_floats(DType::F32, [values.len()], values.iter().copied());
        let (expected, rounded) = (tensor(&[2e-10, -1e-10]), tensor(&[3e-9, 1e-9]));
        let share = rounding_over_bf16(DType::F32);
        let explained = |found: &[f64]| is_noise(&expected, &tensor(found), &rounded, share);
        assert!(explained(&[-4e-10, 3e-10]));
        assert!(!explained(&[1e-6, 0.0]) && !explained(&[f64::NAN, 0.0]));
        // A tensor that holds in its first digits is no noise.
        let expected = tensor(&[1.0, -1e-10]);
        assert!(!is_noise(
            &expected,
            &tensor(&[1.001, 0.0]),
            &tensor(&[1.000_01, 1e-5]),
            share
        ));
        // Rounding that changes one element of many does not explain that all differ.
        let expected = tensor(&[1.0; 4096]);
        let (mut rounded, mut found) = (vec![1.0; 4096], vec![1.0; 4096]);
        (rounded[7], found[9]) = (1.01, 0.99);
        assert!(is_noise(&expected, &tensor(&found), &tensor(&rounded), share));
        assert!(!is_noise(
            &expected,
            &tensor(&[0.99; 4096]),
            &tensor(&rounded),
            share
        ));
    }

    #[test]
    fn rounding_moves_what_is_computed_by_its_share() {
        let mut graph = Graph::new("rounded");
        let x = graph.parameter(TensorType::new(DType::F32, [5]));
        let p = Provenance::default();
        let negative = graph.unary(UnaryOp::Neg, x, &p).unwrap();
        let shaped = graph.reshape(negative, [5, 1], &p).unwrap();
        graph.output(x, None);
        graph.output(shaped, None);
        let values = [1.0f32, 1.000_976_6, f32::MIN, f32::INFINITY, -3.003_906_2];
        let share = 2f64.powi(-3);
        let graph = rounded(&graph, share).unwrap();
        let outputs = kiln_graph::interpret(&graph, &[HostTensor::from_vec([5], values)], &[]).unwrap();
        let outputs: Vec<Vec<f64>> = outputs.iter().map(HostTensor::to_f64s).collect();
        assert_eq!(outputs[0], values.map(f64::from), "arguments are as they were");
        let moved = |x: f64, half: f64| x + share * (half - x);
        assert_eq!(outputs[1][0], -1.0);
        assert!((outputs[1][1] - moved(-1.000_976_6, -1.0)).abs() < 1e-6);
        assert!((outputs[1][1] + 1.000_976_6).abs() > 1e-4);
        assert_eq!(outputs[1][2..4], [f64::from(f32::MAX), f64::NEG_INFINITY]);
        assert!((outputs[1][4] - moved(3.003_906_2, 3.0)).abs() < 1e-6);
    }

    fn floats(values: &[f32]) -> HostTensor {
        HostTensor::from_vec([values.len()], values)
    }

    #[test]
    fn tolerance_is_relative_to_the_largest_magnitude() {
        let expected = floats(&[1000.0, 1.0, f32::NAN, f32::INFINITY]);
        let close = floats(&[1000.0, 1.05, f32::NAN, f32::INFINITY]);
        assert_eq!(difference(&expected, &close, 1e-4), None);
        let far = floats(&[1000.0, 1.5, f32::NAN, 3.0]);
        let found = difference(&expected, &far, 1e-4).unwrap();
        assert_eq!(
            (found.first, found.count, found.expected, found.found),
            (1, 2, 1.0, 1.5)
        );
        assert!(
            difference(&expected, &floats(&[1000.0, 1.0, 0.0, f32::INFINITY]), 1e-4).is_some(),
            "NaN became a number"
        );
    }

    #[test]
    fn sixteen_bits_may_differ_in_the_last_place() {
        let tensor = |values: [f64; 2], dtype| HostTensor::from_floats(dtype, [2], values);
        for (dtype, place) in [(DType::BF16, 2f64.powi(-7)), (DType::F16, 2f64.powi(-10))] {
            let expected = tensor([1.0, 0.5], dtype);
            let next = tensor([1.0 + place, 0.5], dtype);
            assert_eq!(difference(&expected, &next, 1e-6), None);
            let far = tensor([1.0 + 2.0 * place, 0.5], dtype);
            assert!(difference(&expected, &far, 1e-6).is_some());
        }
    }

    #[test]
    fn integers_must_be_equal() {
        let expected = HostTensor::from_vec([2], [1000i64, 1]);
        assert!(difference(&expected, &HostTensor::from_vec([2], [1000i64, 2]), 0.5).is_some());
    }
}
