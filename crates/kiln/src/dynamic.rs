//! Dimensions that vary from call to call.

use std::ops::RangeBounds;

use kiln_burn::record::{DynamicError, mark};

use crate::input::{StepInput, inspect};

/// Marks dimension `dim` of a tensor (of each tensor, if `input` has several): it varies within `range` from
/// one call of a compiled step to the next.
///
/// A step whose inputs are marked is compiled with kernels that have the marked sizes as variables, over
/// their whole range, from its first call on. Without marks a step pays for that at its second size
/// ([`Dynamic::Auto`](crate::Dynamic::Auto)); under [`Dynamic::Marked`](crate::Dynamic::Marked) only marked
/// dimensions, and those that always have their size, become variables.
///
/// ```
/// use burn_tensor::Tensor;
/// use kiln::{CompileOptions, Dynamic, Kiln, KilnDevice};
///
/// let mut step = kiln::compile(CompileOptions::default().with_dynamic(Dynamic::Marked));
/// for length in [12, 7, 31] {
///     let x = Tensor::<Kiln, 2>::ones([4, length], &KilnDevice::cpu());
///     kiln::dynamic(&x, 1, 2..=64)?;
///     let y = step.run(|| (x * 2.0).sum_dim(1))?;
///     assert_eq!(y.into_data().to_vec::<f32>().unwrap(), [2.0 * length as f32; 4]);
/// }
/// assert!(step.report().compiles[1..].iter().all(|event| event.absorbed));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// - The mark belongs to the tensor: clones have it, and so has the tensor inside or outside of `Autodiff`,
///   in a
///   batch that is given to [`TrainStep::step`](crate::TrainStep::step), or captured by a closure. A tensor that
///   is computed from it has none. Marks of the first call also count for later calls with tensors that are not
///   marked.
/// - Dimensions that always have the size of a marked one (the mask of a batch of sentences) need no mark of
///   their own.
/// - A size outside of the range, in a later call with a tensor that is not marked, is no error: it is
///   compiled
///   if kernels for it are missing, and `explain` says so.
/// - A dimension that the program pins is compiled for each of its sizes, and `explain` says what pins it:
///   the
///   operation that needs one size, or the program's own decision (a branch, a loop over the size, a number made
///   of it) when a second size comes.
/// - `Tensor::arange` of fewer than 8 elements is recorded as data, so where a program uses it lengths below
///   8 are
///   another step.
/// - Marks are for the backends `cpu` and `cuda`; the others compile nothing, and results are the same
///   everywhere.
///
/// # Errors
///
/// [`DynamicError`] if there is no such dimension, the range has no size of at least 2 (a dimension of size 1
/// is repeated where larger ones are not, so it is a step of its own), the tensor's own size is outside of
/// the range, or the tensor is a result of the region that is being recorded. Of several tensors, those
/// before the one at fault are marked.
pub fn dynamic(
    input: &impl StepInput,
    dim: usize,
    range: impl RangeBounds<usize>,
) -> Result<(), DynamicError> {
    let (tensors, _) = inspect(input);
    if tensors.is_empty() {
        return Err(DynamicError::NoTensor { dim });
    }
    tensors.iter().try_for_each(|tensor| mark(tensor, dim, &range))
}
