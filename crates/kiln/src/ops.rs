//! Operations that Burn computes on the host, as operations of the graph.
//!
//! Burn's `sort`, `argsort`, `topk_with_indices`, `median` and `one_hot` read the tensor and continue in
//! Rust: inside a compiled region that cuts the graph, and a [`crate::TrainStep`] whose model calls one is
//! never replayed. The functions of this module have their names, arguments and results, work on every Burn
//! backend, and on Kiln stay in the graph. They are differentiable where Burn's are: values follow from the
//! sorted positions by a gather, whose gradient is a scatter.
//!
//! Equal elements keep their order, in both directions. NaN counts as the largest element.
//!
//! ```
//! use burn_tensor::{Int, Tensor};
//! use kiln::{Kiln, KilnDevice, ops};
//!
//! let scores = Tensor::<Kiln, 2>::from_floats([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]], &KilnDevice::cpu());
//! let (weights, experts) = ops::topk_with_indices(scores, 2, 1);
//! assert_eq!(weights.into_data().to_vec::<f32>().unwrap(), [0.7, 0.2, 0.5, 0.4]);
//! let mask: Tensor<Kiln, 3, Int> = ops::one_hot(experts, 3);
//! assert_eq!(mask.dims(), [2, 2, 3]);
//! ```

use std::any::{Any, TypeId};

use burn_backend::tensor::Ordered;
use burn_tensor::backend::Backend;
use burn_tensor::{Bool, DType, IndexingUpdateOp, Int, Tensor};
use kiln_burn::KilnDevice;

/// Whether `B` is `Kiln`, alone or under `Autodiff`.
fn is_kiln<B: Backend>() -> bool {
    TypeId::of::<B::Device>() == TypeId::of::<KilnDevice>()
}

/// The positions of the `k` largest elements, largest first, on Kiln.
fn positions<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    dim: usize,
    k: usize,
) -> Tensor<B, D, Int> {
    // By the kind's own method: that of `Tensor` refuses `k` equal to the size of the dimension.
    match narrow_integers(tensor) {
        Ok(tensor) => Tensor::new(<Int as Ordered<B>>::argtopk(
            tensor.cast(DType::I64).into_primitive(),
            dim,
            k,
        )),
        Err(tensor) => {
            let positions: Tensor<B, D, Int> = Tensor::new(K::argtopk(tensor.into_primitive(), dim, k));
            match positions.dtype() {
                // As its positions are, which are subtracted from.
                DType::U64 => positions.cast(DType::I64),
                _ => positions,
            }
        }
    }
}

/// `tensor`, if it has integers of a type that may not have the numbers of its positions: Burn announces the
/// positions of integers in the integers' own type.
fn narrow_integers<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
) -> Result<Tensor<B, D, Int>, Tensor<B, D, K>> {
    let is_narrow = matches!(
        tensor.dtype(),
        DType::I8 | DType::I16 | DType::U8 | DType::U16 | DType::U32
    );
    match is_narrow {
        true => {
            let any: Box<dyn Any> = Box::new(tensor);
            Ok(*any
                .downcast()
                .expect("a tensor of integers is one of the kind `Int`"))
        }
        false => Err(tensor),
    }
}

/// # Panics
///
/// If the tensor has no such dimension.
fn check_dim<const D: usize>(operation: &str, dim: usize) {
    assert!(
        dim < D,
        "{operation}: dimension {dim} of a tensor of {D} dimensions"
    );
}

/// The positions that sort `tensor` along `dim`, smallest element first: `int[shape of tensor]`.
///
/// # Panics
///
/// If the tensor has no dimension `dim`.
pub fn argsort<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    dim: usize,
) -> Tensor<B, D, Int> {
    check_dim::<D>("argsort", dim);
    if !is_kiln::<B>() {
        return tensor.argsort(dim);
    }
    let extent = tensor.dims()[dim];
    if extent == 0 {
        return tensor.argsort(dim);
    }
    // The elements are sorted in reverse order and direction, which restores the order of equal elements.
    let opposite = positions(tensor.flip([dim as isize]), dim, extent).flip([dim as isize]);
    opposite.neg().add_scalar(extent as i64 - 1)
}

/// The positions that sort `tensor` along `dim`, largest element first: `int[shape of tensor]`.
///
/// # Panics
///
/// If the tensor has no dimension `dim`.
pub fn argsort_descending<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    dim: usize,
) -> Tensor<B, D, Int> {
    check_dim::<D>("argsort_descending", dim);
    let extent = tensor.dims()[dim];
    if !is_kiln::<B>() || extent == 0 {
        return tensor.argsort_descending(dim);
    }
    positions(tensor, dim, extent)
}

/// `tensor` with its elements along `dim` sorted, smallest first.
///
/// # Panics
///
/// If the tensor has no dimension `dim`.
pub fn sort<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    dim: usize,
) -> Tensor<B, D, K> {
    sort_with_indices(tensor, dim).0
}

/// `tensor` with its elements along `dim` sorted, largest first.
///
/// # Panics
///
/// If the tensor has no dimension `dim`.
pub fn sort_descending<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    dim: usize,
) -> Tensor<B, D, K> {
    sort_descending_with_indices(tensor, dim).0
}

/// [`sort`] and [`argsort`].
///
/// # Panics
///
/// If the tensor has no dimension `dim`.
pub fn sort_with_indices<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    dim: usize,
) -> (Tensor<B, D, K>, Tensor<B, D, Int>) {
    let indices = argsort(tensor.clone(), dim);
    (tensor.gather(dim, indices.clone()), indices)
}

/// [`sort_descending`] and [`argsort_descending`].
///
/// # Panics
///
/// If the tensor has no dimension `dim`.
pub fn sort_descending_with_indices<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    dim: usize,
) -> (Tensor<B, D, K>, Tensor<B, D, Int>) {
    let indices = argsort_descending(tensor.clone(), dim);
    (tensor.gather(dim, indices.clone()), indices)
}

/// The positions of the `k` largest elements along `dim`, largest first: the shape of `tensor` with `k` at
/// `dim`.
///
/// # Panics
///
/// If the tensor has no dimension `dim`, or it has fewer than `k` elements there.
pub fn argtopk<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    k: usize,
    dim: usize,
) -> Tensor<B, D, Int> {
    check_dim::<D>("topk", dim);
    let extent = tensor.dims()[dim];
    assert!(
        k <= extent,
        "topk: {k} of the {extent} elements of dimension {dim}"
    );
    if !is_kiln::<B>() || k == 0 {
        return argsort_descending(tensor, dim).narrow(dim, 0, k);
    }
    positions(tensor, dim, k)
}

/// The `k` largest elements along `dim`, largest first: the shape of `tensor` with `k` at `dim`.
///
/// # Panics
///
/// If the tensor has no dimension `dim`, or it has fewer than `k` elements there.
pub fn topk<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    k: usize,
    dim: usize,
) -> Tensor<B, D, K> {
    topk_with_indices(tensor, k, dim).0
}

/// [`topk`] and [`argtopk`].
///
/// # Panics
///
/// If the tensor has no dimension `dim`, or it has fewer than `k` elements there.
pub fn topk_with_indices<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    k: usize,
    dim: usize,
) -> (Tensor<B, D, K>, Tensor<B, D, Int>) {
    let indices = argtopk(tensor.clone(), k, dim);
    (tensor.gather(dim, indices.clone()), indices)
}

/// The median along `dim`, of two middle elements the lower: the shape of `tensor` with 1 at `dim`.
///
/// # Panics
///
/// If the tensor has no dimension `dim`, or it has no elements there.
pub fn median<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    dim: usize,
) -> Tensor<B, D, K> {
    median_with_indices(tensor, dim).0
}

/// [`median`], and the position of the element that it is.
///
/// # Panics
///
/// If the tensor has no dimension `dim`, or it has no elements there.
pub fn median_with_indices<B: Backend, const D: usize, K: Ordered<B> + 'static>(
    tensor: Tensor<B, D, K>,
    dim: usize,
) -> (Tensor<B, D, K>, Tensor<B, D, Int>) {
    check_dim::<D>("median", dim);
    let extent = tensor.dims()[dim];
    assert!(extent > 0, "median: dimension {dim} has no elements");
    let indices = argsort(tensor.clone(), dim).narrow(dim, (extent - 1) / 2, 1);
    (tensor.gather(dim, indices.clone()), indices)
}

/// For each index a row of `num_classes` elements, 1 where the index is and 0 elsewhere: `int[shape of
/// indices.., num_classes]`. A negative index counts from the end.
///
/// `one_hot(labels, 10).float()` is for a product with floats.
///
/// # Panics
///
/// If `D2` is not `D + 1`. Like Burn's `scatter`, if an index is out of range.
pub fn one_hot<B: Backend, const D: usize, const D2: usize>(
    indices: Tensor<B, D, Int>,
    num_classes: usize,
) -> Tensor<B, D2, Int> {
    assert!(D2 == D + 1, "one_hot: {D} dimensions become {}, not {D2}", D + 1);
    let negative: Tensor<B, D, Bool> = indices.clone().lower_elem(0);
    let from_end = indices.clone().add_scalar(num_classes as i64);
    let indices = indices.mask_where(negative, from_end).unsqueeze_dim::<D2>(D);
    let device = indices.device();
    let mut shape = indices.dims();
    let ones = Tensor::ones(shape, &device);
    shape[D] = num_classes;
    Tensor::zeros(shape, &device).scatter(D, indices, ones, IndexingUpdateOp::Add)
}
