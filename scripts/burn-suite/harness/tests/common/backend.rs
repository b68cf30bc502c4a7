//! The names Burn's tests expect: a backend, its device, tensor types. The including file gives
//! `TestBackend` and the element types.

use super::{FloatElem, IntElem, TestBackend};
use burn_tensor::Element;

#[cfg(feature = "flex")]
pub type Inner = burn_flex::Flex;
#[cfg(not(feature = "flex"))]
pub type Inner = kiln_burn::Kiln;

#[ctor::ctor]
fn default_dtypes() {
    burn_tensor::set_default_dtypes::<TestBackend>(
        &burn_tensor::Device::<Inner>::default(),
        FloatElem::dtype(),
        IntElem::dtype(),
    )
    .expect("no other default is set before");
}

pub use burn_tensor::Tensor;
pub type TestTensor<const D: usize> = Tensor<TestBackend, D>;
pub type TestTensorInt<const D: usize> = Tensor<TestBackend, D, burn_tensor::Int>;
pub type TestTensorBool<const D: usize> = Tensor<TestBackend, D, burn_tensor::Bool>;

pub mod prelude {
    pub use super::{Tensor, TestTensor, TestTensorBool, TestTensorInt};
}
