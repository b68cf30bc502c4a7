//! A product that is ready to run, and its calls.

use std::ffi::c_void;
use std::sync::Arc;

use super::describe::Described;
use super::product::{Compute, Product, ScalarsFrom};
use super::search::Choice;
use super::{Multiplier, check};
use crate::error::{CudaError, Result};
use crate::runtime::{Storage, Stream};
use crate::sys::cublaslt::{HeuristicResult, MatmulAlgorithm};

/// A storage from byte `.1` on.
pub type Place<'a> = (&'a Arc<Storage>, usize);

/// Where a product's matrices are.
#[derive(Debug, Clone, Copy)]
pub struct ProductArguments<'a> {
    /// The left operand.
    pub left: Place<'a>,
    /// The right operand.
    pub right: Place<'a>,
    /// The result.
    pub result: Place<'a>,
    /// The vector to add or to write, for epilogues that have one.
    pub vector: Option<Place<'a>>,
    /// `alpha` and `beta`, for [`ScalarsFrom::Device`].
    pub scalars: Option<Place<'a>>,
    /// Working memory of [`Choice::workspace_bytes`] bytes, which nothing else uses at that time.
    pub workspace: Option<Place<'a>>,
}

impl<'a> ProductArguments<'a> {
    /// A product without vector, scalars and working memory.
    pub fn new(left: Place<'a>, right: Place<'a>, result: Place<'a>) -> Self {
        Self {
            left,
            right,
            result,
            vector: None,
            scalars: None,
            workspace: None,
        }
    }

    /// Everything that the call uses.
    pub fn storages(&self) -> Vec<&'a Arc<Storage>> {
        let optional = [self.vector, self.scalars, self.workspace];
        let places = [self.left, self.right, self.result]
            .into_iter()
            .chain(optional.into_iter().flatten());
        places.map(|(storage, _)| storage).collect()
    }
}

/// A product with its algorithm.
#[derive(Debug)]
pub struct PreparedProduct<'a> {
    multiplier: &'a Multiplier,
    product: Product,
    described: Described,
    algorithm: MatmulAlgorithm,
    workspace_bytes: usize,
    /// How the error of a lost device names this call as the last launch.
    label: Arc<str>,
}

impl Multiplier {
    /// Makes `product` ready to run as `choice` says.
    ///
    /// # Errors
    /// [`CudaError::Product`] if the library does not take the algorithm (any more), [`CudaError::Lost`].
    pub fn prepare(&self, product: &Product, choice: &Choice) -> Result<PreparedProduct<'_>> {
        let described = Described::new(self, product)?;
        let algorithm = MatmulAlgorithm(choice.algorithm);
        if choice.library != self.version() {
            return Err(CudaError::Product {
                product: product.to_string(),
                call: "Kiln",
                what: format!(
                    "that the algorithm is cuBLASLt {}'s, not {}'s",
                    choice.library,
                    self.version()
                ),
            });
        }
        let mut result = HeuristicResult::default();
        self.device.enter()?;
        // SAFETY: all descriptions are alive; both pointers are to values on this stack.
        let status = unsafe {
            (self.library.functions.cublasLtMatmulAlgoCheck)(
                self.handle,
                described.description,
                described.a,
                described.b,
                described.d,
                described.d,
                &raw const algorithm,
                &raw mut result,
            )
        };
        check(status, "cublasLtMatmulAlgoCheck", || product.to_string())?;
        Ok(self.prepared(product, described, algorithm, result.workspace_bytes))
    }

    pub(super) fn prepared(
        &self,
        product: &Product,
        described: Described,
        algorithm: MatmulAlgorithm,
        workspace_bytes: usize,
    ) -> PreparedProduct<'_> {
        PreparedProduct {
            multiplier: self,
            label: format!("product {product}").into(),
            product: product.clone(),
            described,
            algorithm,
            workspace_bytes,
        }
    }
}

impl PreparedProduct<'_> {
    /// Queues the product on a stream, which may be capturing.
    ///
    /// # Errors
    /// [`CudaError::Range`] if an argument is missing or too small, [`CudaError::TwoDevices`],
    /// [`CudaError::Product`], [`CudaError::Lost`].
    pub fn run(&mut self, stream: &Stream, arguments: &ProductArguments<'_>) -> Result<()> {
        let product = &self.product;
        let device = &self.multiplier.device;
        device.same_as(stream.device(), "queuing a product on a stream")?;
        let left = pointer(
            Some(arguments.left),
            product.left_bytes(),
            "the left operand of a product",
        )?;
        let right = pointer(
            Some(arguments.right),
            product.right_bytes(),
            "the right operand of a product",
        )?;
        let result = pointer(
            Some(arguments.result),
            product.result_bytes(),
            "the result of a product",
        )?;
        let vector = pointer(
            arguments.vector,
            product.vector_bytes(),
            "the vector of a product",
        )?;
        let on_device = product.scalars == ScalarsFrom::Device;
        let scalar_bytes = if on_device { 2 * product.scalar_bytes() } else { 0 };
        let scalars = pointer(arguments.scalars, scalar_bytes, "the factors of a product")?;
        let workspace = pointer(
            arguments.workspace,
            self.workspace_bytes,
            "the working memory of a product",
        )?;
        if product.epilogue.has_vector() {
            self.described.set_vector(vector, product)?;
        }
        for storage in arguments.storages() {
            storage.take_to(stream)?;
        }
        device.enter()?;
        device.note_launch(&self.label);
        // The host's factors, in the type of the sums. They are read before the call returns.
        let (one, kept) = (
            1.0_f32,
            if product.scalars == ScalarsFrom::Sum {
                1.0_f32
            } else {
                0.0
            },
        );
        let (wide_one, wide_kept) = (f64::from(one), f64::from(kept));
        let (alpha, beta): (*const c_void, *const c_void) = match product.compute {
            _ if on_device => (address(scalars), address(scalars + product.scalar_bytes() as u64)),
            Compute::F64 => ((&raw const wide_one).cast(), (&raw const wide_kept).cast()),
            Compute::F32 | Compute::Tf32 => ((&raw const one).cast(), (&raw const kept).cast()),
        };
        // SAFETY: every place is as large as the product needs (`pointer`) and is freed in the order of this
        // stream; descriptions, algorithm and factors live until the call returns, which has then taken what
        // it needs of them.
        let status = unsafe {
            (self.multiplier.library.functions.cublasLtMatmul)(
                self.multiplier.handle,
                self.described.description,
                alpha,
                address(right),
                self.described.a,
                address(left),
                self.described.b,
                beta,
                address(result),
                self.described.d,
                address(result).cast_mut(),
                self.described.d,
                &raw const self.algorithm,
                address(workspace).cast_mut(),
                self.workspace_bytes,
                stream.raw(),
            )
        };
        check(status, "cublasLtMatmul", || product.to_string())
    }

    /// Bytes of working memory that a call needs.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }
}

/// An address of the device's memory as the library takes it.
fn address(address: u64) -> *const c_void {
    address as *const c_void
}

/// The address of `bytes` bytes at `place`; zero if none are needed.
fn pointer(place: Option<Place<'_>>, bytes: usize, action: &'static str) -> Result<u64> {
    match place {
        _ if bytes == 0 => Ok(0),
        Some((storage, at)) => storage.part(&(at..at.saturating_add(bytes)), action),
        None => Err(CudaError::Range {
            action,
            start: 0,
            end: bytes,
            size: 0,
        }),
    }
}
