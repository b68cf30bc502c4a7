//! Structures of batches and of their elements.

use burn_backend::TensorMetadata;
use burn_tensor::{Bool, Float, Int, Tensor, TensorPrimitive};

use super::FuncError;
use crate::input::{InputVisitor, KilnBackend, KilnTensor, StepInput, TensorMap};

/// A value that is the same for all elements of a batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Same<T>(pub T);

impl<T: StepInput> StepInput for Same<T> {
    fn visit(&self, visitor: &mut InputVisitor) {
        self.0.visit(visitor);
    }

    fn map(self, map: &mut dyn TensorMap) -> Self {
        Self(self.0.map(map))
    }
}

/// A batch: a tensor whose first dimension counts the elements, [`Same`], or a structure of these.
pub trait Batched: StepInput {
    /// One element.
    type Element: StepInput;

    /// A placeholder for an element.
    fn element(self, elements: &mut Elements) -> Self::Element;
}

/// A value that a function returns for one element.
pub trait Element: StepInput {
    /// A batch of it.
    type Batched: StepInput;

    /// The same value under the type of a batch. Its tensors are filled when the function has run.
    fn batched(self) -> Self::Batched;
}

/// The tensors of a batch, collected when it is taken apart.
#[derive(Debug, Default)]
pub struct Elements {
    /// For each tensor, whether elements have their own.
    pub(super) varies: Vec<bool>,
    sizes: Vec<usize>,
}

impl Elements {
    /// A placeholder for the element of a batch.
    fn own(&mut self, batch: KilnTensor) -> KilnTensor {
        let shape = batch.shape();
        self.varies.push(true);
        self.sizes.push(shape[0]);
        let element: Vec<usize> = shape.iter().skip(1).copied().collect();
        batch.client.zeros(element.into(), batch.dtype())
    }

    /// How many elements there are.
    pub(super) fn size(&self, function: &str) -> Result<usize, FuncError> {
        let function = || function.to_owned();
        let Some(&first) = self.sizes.first() else {
            return Err(FuncError::NoBatch { function: function() });
        };
        match self.sizes.iter().find(|&&size| size != first) {
            Some(&other) => Err(FuncError::Sizes {
                function: function(),
                first,
                other,
            }),
            None => Ok(first),
        }
    }
}

impl<T: StepInput> Batched for Same<T> {
    type Element = T;

    fn element(self, elements: &mut Elements) -> T {
        self.0.map(&mut |tensor: KilnTensor| {
            elements.varies.push(false);
            tensor
        })
    }
}

/// Tensors of each rank: the batch has one dimension more.
macro_rules! tensors {
    ($($rank:literal of $element:literal),*) => {$(
        impl<B: KilnBackend> Batched for Tensor<B, $rank, Float> {
            type Element = Tensor<B, $element, Float>;

            fn element(self, elements: &mut Elements) -> Self::Element {
                let element = elements.own(B::to_kiln(self.into_primitive().tensor()));
                Tensor::from_primitive(TensorPrimitive::Float(B::from_kiln(element)))
            }
        }

        impl<B: KilnBackend> Element for Tensor<B, $element, Float> {
            type Batched = Tensor<B, $rank, Float>;

            fn batched(self) -> Self::Batched {
                Tensor::from_primitive(self.into_primitive())
            }
        }

        tensors!(Int $rank $element);
        tensors!(Bool $rank $element);
    )*};
    ($kind:ident $rank:literal $element:literal) => {
        impl<B: KilnBackend> Batched for Tensor<B, $rank, $kind> {
            type Element = Tensor<B, $element, $kind>;

            fn element(self, elements: &mut Elements) -> Self::Element {
                Tensor::from_primitive(elements.own(self.into_primitive()))
            }
        }

        impl<B: KilnBackend> Element for Tensor<B, $element, $kind> {
            type Batched = Tensor<B, $rank, $kind>;

            fn batched(self) -> Self::Batched {
                Tensor::from_primitive(self.into_primitive())
            }
        }
    };
}

tensors!(2 of 1, 3 of 2, 4 of 3, 5 of 4, 6 of 5, 7 of 6, 8 of 7);

impl<T: Batched> Batched for Vec<T> {
    type Element = Vec<T::Element>;

    fn element(self, elements: &mut Elements) -> Self::Element {
        self.into_iter().map(|item| item.element(elements)).collect()
    }
}

impl<T: Element> Element for Vec<T> {
    type Batched = Vec<T::Batched>;

    fn batched(self) -> Self::Batched {
        self.into_iter().map(Element::batched).collect()
    }
}

impl<T: Batched, const N: usize> Batched for [T; N] {
    type Element = [T::Element; N];

    fn element(self, elements: &mut Elements) -> Self::Element {
        self.map(|item| item.element(elements))
    }
}

impl<T: Element, const N: usize> Element for [T; N] {
    type Batched = [T::Batched; N];

    fn batched(self) -> Self::Batched {
        self.map(Element::batched)
    }
}

impl Batched for () {
    type Element = ();

    fn element(self, _: &mut Elements) {}
}

impl Element for () {
    type Batched = ();

    fn batched(self) {}
}

macro_rules! tuple {
    ($($name:ident $index:tt),*) => {
        impl<$($name: Batched),*> Batched for ($($name,)*) {
            type Element = ($($name::Element,)*);

            fn element(self, elements: &mut Elements) -> Self::Element {
                ($(self.$index.element(elements),)*)
            }
        }

        impl<$($name: Element),*> Element for ($($name,)*) {
            type Batched = ($($name::Batched,)*);

            fn batched(self) -> Self::Batched {
                ($(self.$index.batched(),)*)
            }
        }
    };
}

tuple!(T0 0);
tuple!(T0 0, T1 1);
tuple!(T0 0, T1 1, T2 2);
tuple!(T0 0, T1 1, T2 2, T3 3);
tuple!(T0 0, T1 1, T2 2, T3 3, T4 4);
tuple!(T0 0, T1 1, T2 2, T3 3, T4 4, T5 5);
