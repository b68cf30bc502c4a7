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
//! Some tensors are rounding and nothing else: the gradient of a bias before batch norm, or of the keys' bias
//! in attention, is zero but for it. When an output differs, the reference therefore also runs with each
//! value that it computes rounded to `bf16`. What that changes, times the rounding of the step over that of `bf16`,
//! is the noise of the output. If it drowns the output, a difference of the noise's size says nothing, and
//! agrees.
//!
//! Under autocast the step rounds to 16 bits where the reference does not, at every product of a chain, and an
//! optimizer may divide small numbers by each other: numbers agree then if they differ by at most
//! [`allowed_by_autocast`]. A tensor that is itself stored in 16 bits may be off by one unit in the last place.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kiln_graph::{DType, Graph, HostTensor, NodeData, Op, Rewriter, TypeError};

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
pub fn difference(expected: &HostTensor, found: &HostTensor, tolerance: f64) -> Option<Difference> {
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

/// The graph with every value of `f32` that it computes rounded to `bf16`.
fn rounded(graph: &Graph) -> Result<Graph, TypeError> {
    let mut new = Rewriter::new(graph);
    for (id, node) in graph.nodes() {
        new.copy(id)?;
        if matches!(node.op, Op::Parameter { .. } | Op::Scalar { .. }) {
            continue;
        }
        for &value in node
            .outputs
            .iter()
            .filter(|&&value| graph.ty(value).dtype == DType::F32)
        {
            let whole = new.map(value);
            let half = new.graph.cast(whole, DType::BF16, &node.provenance)?;
            let back = new.graph.cast(half, DType::F32, &node.provenance)?;
            new.replace(value, back);
        }
    }
    Ok(new.finish())
}

/// Whether a tensor is drowned by its noise, and `found` is no further from it than that explains. `rounded`
/// is what the reference makes of it with values rounded to `bf16`, of which the step's rounding is `share`.
fn is_noise(expected: &HostTensor, found: &HostTensor, rounded: &HostTensor, share: f64) -> bool {
    if !expected.ty().dtype.is_float() {
        return false;
    }
    let expected = expected.to_f64s();
    let furthest = |other: &HostTensor| {
        let pairs = expected.iter().zip(other.to_f64s());
        // A NaN is no distance: it makes the whole infinite.
        pairs.fold(0.0f64, |most, (a, b)| match (a - b).abs() {
            distance if distance.is_nan() => f64::INFINITY,
            distance => most.max(distance),
        })
    };
    let largest = expected.iter().fold(0.0f64, |most, x| most.max(x.abs()));
    let noise = share * furthest(rounded);
    noise.is_finite() && noise >= largest / 16.0 && furthest(found) <= 32.0 * noise
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
        let differs = |(index, (expected, found)): (usize, (&Storage, &Storage))| {
            let (expected, found) = (expected.to_host_tensor()?, found.to_host_tensor()?);
            difference(&expected, &found, tolerance).map(|difference| (index, difference))
        };
        let differing = || expected.iter().zip(outputs).enumerate().filter_map(differs);
        if differing().next().is_none() {
            return Ok(());
        }
        let rounded = self.rounded(graph, inputs, scalars);
        let explained = |index: usize| {
            let tensors = rounded.as_ref().and_then(|rounded| {
                let rounded = rounded[index].to_host_tensor()?;
                Some((
                    expected[index].to_host_tensor()?,
                    outputs[index].to_host_tensor()?,
                    rounded,
                ))
            });
            tensors.is_some_and(|(a, b, rounded)| is_noise(&a, &b, &rounded, self.rounding))
        };
        let Some((index, difference)) = differing().find(|(index, _)| !explained(*index)) else {
            return Ok(());
        };
        let located = executable.locate(&Reference {
            backend: self.check.backend,
            options: &self.options,
            tolerance,
            inputs,
            scalars,
        })?;
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

impl Checker {
    /// The outputs of the reference with values rounded to `bf16`; none if it cannot run so. What ranks do
    /// together is done once.
    fn rounded(&self, graph: &Graph, inputs: &[Storage], scalars: &[u64]) -> Option<Vec<Storage>> {
        if graph
            .nodes()
            .any(|(_, node)| matches!(node.op, Op::Collective(_)))
        {
            return None;
        }
        let graph = Arc::new(rounded(graph).ok()?);
        let (reference, _) = prepare(self.check.backend, 0, graph, &self.options, Setting::default()).ok()?;
        reference.run(inputs.to_vec(), scalars).ok()
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
    pub fn values(&self, graph: Graph) -> Result<Vec<Storage>, ExecuteError> {
        let (reference, _) = prepare(self.backend, 0, Arc::new(graph), self.options, Setting::default())?;
        reference.run(self.inputs.to_vec(), self.scalars)
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
        let expected = self.values(all.clone())?;
        let parting = expected
            .iter()
            .zip(&found)
            .zip(nodes)
            .find_map(|((expected, found), node)| {
                let (expected, found) = (expected.to_host_tensor()?, found.to_host_tensor()?);
                let difference = difference(&expected, &found, self.tolerance)?;
                Some(Parting::at(graph, node, difference))
            });
        Ok(parting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_explains_differences_of_its_own_size_alone() {
        let tensor =
            |values: &[f64]| HostTensor::from_floats(DType::F32, [values.len()], values.iter().copied());
        let (expected, rounded) = (tensor(&[2e-10, -1e-10]), tensor(&[3e-5, 1e-5]));
        let share = rounding_over_bf16(DType::F32);
        let explained = |found: &[f64]| is_noise(&expected, &tensor(found), &rounded, share);
        assert!(explained(&[-4e-10, 3e-10]));
        assert!(!explained(&[1e-6, 0.0]) && !explained(&[f64::NAN, 0.0]));
        // A tensor that holds in its first digits is no noise.
        let expected = tensor(&[1.0, -1e-10]);
        assert!(!is_noise(
            &expected,
            &tensor(&[1.001, 0.0]),
            &tensor(&[1.004, 1e-5]),
            share
        ));
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
