//! Faults of a backend, and how they are noticed.

use std::fmt;

use kiln_graph::{DType, Graph, HostTensor, InterpretError, Scalar, interpret, interpret_f64};
use serde::{Deserialize, Serialize};

use crate::case::Case;

/// A backend under test: it runs graphs and may be wrong.
pub trait Subject {
    /// The outputs of `graph` for these arguments.
    ///
    /// # Errors
    /// [`Failure`], which is a fault to be minified.
    fn run(
        &self,
        graph: &Graph,
        inputs: &[HostTensor],
        scalars: &[Scalar],
    ) -> Result<Vec<HostTensor>, Failure>;
}

/// Why a subject has no outputs.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failure {
    /// It does not compile the graph.
    Refused(String),
    /// It compiled the graph, and running it failed.
    Failed(String),
}

/// A fault of a backend.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub enum Fault {
    /// An output differs from the interpreter's beyond rounding.
    Differs {
        /// Number of the output.
        output: usize,
        /// The first element that differs, in row-major order.
        element: usize,
        /// The interpreter's value there, as text: JSON has no infinities.
        expected: String,
        /// The backend's value there.
        found: String,
    },
    /// The graph does not compile.
    Refused(String),
    /// Running the compiled graph fails.
    Failed(String),
    /// The process ends: a signal, or an exit status.
    Crashed(String),
    /// The process does not end.
    Hung,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Differs {
                output,
                element,
                expected,
                found,
            } => write!(
                f,
                "output {output} differs: element {element} is {found}, the interpreter has {expected}"
            ),
            Self::Refused(reason) => write!(f, "the graph does not compile: {reason}"),
            Self::Failed(reason) => write!(f, "running the graph fails: {reason}"),
            Self::Crashed(how) => write!(f, "the process crashes: {how}"),
            Self::Hung => f.write_str("the process does not end"),
        }
    }
}

impl Fault {
    /// Whether `other` is the same fault, of another graph: the same kind, and the same message but for
    /// numbers, names of values and paths. Where and by how much an output differs may change.
    pub fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Differs { .. }, Self::Differs { .. }) | (Self::Hung, Self::Hung) => true,
            (Self::Refused(a), Self::Refused(b)) | (Self::Failed(a), Self::Failed(b)) => words(a) == words(b),
            (Self::Crashed(a), Self::Crashed(b)) => a == b,
            _ => false,
        }
    }
}

/// The words of a message that do not depend on sizes and names: those of letters alone, in its first line.
fn words(message: &str) -> Vec<&str> {
    let line = message.lines().next().unwrap_or_default();
    let plain = |word: &&str| !word.is_empty() && word.chars().all(char::is_alphabetic);
    line.split(|c: char| c.is_whitespace() || ",:;()`".contains(c))
        .filter(plain)
        .collect()
}

/// How many times the rounding errors of the interpreter itself a backend may be off: sums in another order,
/// functions of another library.
const ROUNDINGS: f64 = 32.0;

/// The fault that `subject` shows on `case`, if any.
///
/// Two numbers agree if they differ by at most `tolerance` times the largest magnitude of the output, or by
/// a multiple of the error that rounding to the declared types causes in the interpreter there: where a
/// graph subtracts nearly equal numbers, every executor is far off, and none is wrong. Integers and truth
/// values agree if they are equal. NaN agrees with NaN.
///
/// # Errors
/// [`InterpretError`] if the interpreter has no answer (an index out of range): then there is nothing to
/// compare with.
pub fn observe(case: &Case, subject: &dyn Subject, tolerance: f64) -> Result<Option<Fault>, InterpretError> {
    let inputs = case.arguments();
    // The subject first: a crash needs no answer of the interpreter, which may take long.
    let found = subject.run(&case.graph, &inputs, &case.scalars);
    let exact = interpret_f64(&case.graph, &inputs, &case.scalars)?;
    let rounded = interpret(&case.graph, &inputs, &case.scalars)?;
    let found = match found {
        Ok(found) => found,
        Err(Failure::Refused(reason)) => return Ok(Some(Fault::Refused(reason))),
        Err(Failure::Failed(reason)) => return Ok(Some(Fault::Failed(reason))),
    };
    if found.len() != exact.len() {
        let reason = format!("{} outputs instead of {}", found.len(), exact.len());
        return Ok(Some(Fault::Failed(reason)));
    }
    let outputs = exact.iter().zip(&rounded).zip(&found).enumerate();
    for (output, ((exact, rounded), found)) in outputs {
        if found.ty() != rounded.ty() {
            let reason = format!("output is {} instead of {}", found.ty(), rounded.ty());
            return Ok(Some(Fault::Failed(reason)));
        }
        if let Some((element, expected, found)) = difference(exact, rounded, found, tolerance) {
            return Ok(Some(Fault::Differs {
                output,
                element,
                expected,
                found,
            }));
        }
    }
    Ok(None)
}

/// The first wrong element of `found`: its place, the expected value, the value found.
fn difference(
    exact: &HostTensor,
    rounded: &HostTensor,
    found: &HostTensor,
    tolerance: f64,
) -> Option<(usize, String, String)> {
    if !found.ty().dtype.is_float() {
        // Where rounding decides, as between nearly equal candidates of an argmax, either answer is right.
        let (exact, rounded, found) = (exact.to_i64s(), rounded.to_i64s(), found.to_i64s());
        let wrong = |at: &usize| found[*at] != rounded[*at] && found[*at] != exact[*at];
        let at = (0..found.len()).find(wrong)?;
        return Some((at, rounded[at].to_string(), found[at].to_string()));
    }
    let (exact, rounded, values) = (exact.to_f64s(), rounded.to_f64s(), found.to_f64s());
    let largest = exact
        .iter()
        .filter(|x| x.is_finite())
        .fold(0.0f64, |most, x| most.max(x.abs()));
    let errors = exact.iter().zip(&rounded).map(|(a, b)| (a - b).abs());
    let rounding = errors.filter(|error| error.is_finite()).fold(0.0f64, f64::max);
    let allowed = (tolerance.max(4.0 * unit(found.ty().dtype)) * largest).max(ROUNDINGS * rounding);
    let agree = |at: usize| {
        let (a, b) = (rounded[at], values[at]);
        a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() <= allowed || (exact[at] - b).abs() <= allowed
    };
    let at = (0..values.len()).find(|&at| !agree(at))?;
    Some((at, format!("{:?}", exact[at]), format!("{:?}", values[at])))
}

/// The relative distance of neighbouring numbers of a type.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-7),
        DType::F16 => 2f64.powi(-10),
        DType::F64 => f64::EPSILON,
        _ => f64::from(f32::EPSILON),
    }
}
