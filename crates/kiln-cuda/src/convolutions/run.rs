//! A convolution that is ready to run, and its calls.

use std::sync::Arc;

use super::convolution::Convolution;
use super::describe::TENSORS;
use super::descriptor::Descriptor;
use super::search::Plan;
use super::{Convolver, check};
use crate::error::{CudaError, Result};
use crate::products::Place;
use crate::runtime::{GraphBuilder, Node, Storage, Stream};
use crate::sys::cudnn::{CudnnHandle, attribute, descriptor};

/// Where a convolution's tensors are.
#[derive(Debug, Clone, Copy)]
pub struct ConvolutionArguments<'a> {
    /// The image, or its gradient.
    pub x: Place<'a>,
    /// The weight, or its gradient.
    pub w: Place<'a>,
    /// The result, or its gradient.
    pub y: Place<'a>,
    /// Working memory of [`Plan::workspace_bytes`] bytes, which nothing else uses at that time.
    pub workspace: Option<Place<'a>>,
}

impl<'a> ConvolutionArguments<'a> {
    /// Everything that the call uses.
    pub fn storages(&self) -> Vec<&'a Arc<Storage>> {
        let all = [self.x, self.w, self.y].into_iter().chain(self.workspace);
        all.map(|(storage, _)| storage).collect()
    }
}

/// A convolution with its plan.
#[derive(Debug)]
pub struct PreparedConvolution {
    // Dropped before the library's handle is.
    plan: Descriptor,
    convolver: Convolver,
    convolution: Convolution,
    workspace_bytes: usize,
    microseconds: f32,
    /// How the error of a lost device names this call as the last launch.
    label: Arc<str>,
}

/// The same error about `convolution`.
pub(super) fn about(convolution: &Convolution) -> impl Fn(CudaError) -> CudaError {
    move |error| match error {
        CudaError::Convolution { call, what, .. } => CudaError::Convolution {
            convolution: convolution.to_string(),
            call,
            what,
        },
        other => other,
    }
}

impl Convolver {
    /// Makes `convolution` ready to run as `plan` says.
    ///
    /// # Errors
    /// [`CudaError::Convolution`] if the library does not take the plan (any more), [`CudaError::Lost`].
    pub fn prepare(&self, convolution: &Convolution, plan: &Plan) -> Result<PreparedConvolution> {
        if plan.library != self.version() {
            return Err(CudaError::Convolution {
                convolution: convolution.to_string(),
                call: "Kiln",
                what: format!(
                    "that the plan is cuDNN {}'s, not {}'s",
                    plan.library,
                    self.version()
                ),
            });
        }
        let made = self.with_handle(|handle| {
            let functions = self.functions();
            let mut made = Descriptor::new(functions, descriptor::EXECUTION_PLAN)?;
            made.handle(attribute::PLAN_HANDLE, handle)?;
            made.text(attribute::PLAN_JSON, &plan.plan)?;
            made.finalize()?;
            self.prepared(convolution, made, plan.microseconds)
        });
        made.map_err(about(convolution))
    }

    /// `convolution` as the finalized `plan` computes it.
    pub(super) fn prepared(
        &self,
        convolution: &Convolution,
        plan: Descriptor,
        microseconds: f32,
    ) -> Result<PreparedConvolution> {
        let bytes = plan.integer_of(attribute::PLAN_WORKSPACE_SIZE)?;
        Ok(PreparedConvolution {
            label: convolution.to_string().into(),
            plan,
            convolver: self.clone(),
            convolution: convolution.clone(),
            workspace_bytes: usize::try_from(bytes).unwrap_or(0),
            microseconds,
        })
    }
}

impl PreparedConvolution {
    /// Queues the convolution on a stream.
    ///
    /// # Errors
    /// [`CudaError::Range`] if an argument is missing or too small, [`CudaError::TwoDevices`],
    /// [`CudaError::Captured`] if the stream is captured, for which there is [`Self::capture`],
    /// [`CudaError::Convolution`], [`CudaError::Lost`].
    pub fn run(&self, stream: &Stream, arguments: &ConvolutionArguments<'_>) -> Result<()> {
        stream.refuse_in_capture("queuing a convolution")?;
        self.convolver
            .queue(stream, |handle| self.run_with(handle, stream, arguments))
            .map_err(about(&self.convolution))
    }

    /// Adds the convolution to a graph, after the nodes `after`.
    ///
    /// # Errors
    /// As [`Self::run`] and [`GraphBuilder::capture`].
    pub fn capture(
        &self,
        builder: &mut GraphBuilder,
        after: &[Node],
        arguments: &ConvolutionArguments<'_>,
    ) -> Result<Node> {
        let capture = |handle| {
            builder.capture(after, &arguments.storages(), |stream| {
                self.convolver.set_stream(handle, stream)?;
                self.run_with(handle, stream, arguments)
            })
        };
        self.convolver.capture(capture).map_err(about(&self.convolution))
    }

    /// Queues the convolution, for a caller that has the handle, whose stream is this one.
    pub(crate) fn run_with(
        &self,
        handle: CudnnHandle,
        stream: &Stream,
        arguments: &ConvolutionArguments<'_>,
    ) -> Result<()> {
        let device = self.convolver.device();
        device.same_as(stream.device(), "queuing a convolution on a stream")?;
        let convolution = &self.convolution;
        let address = |(storage, at): Place<'_>, bytes: usize, what: &'static str| {
            storage.part(&(at..at.saturating_add(bytes)), what)
        };
        let addresses = [
            address(arguments.x, convolution.x.bytes(), "the image of a convolution")?,
            address(arguments.w, convolution.w.bytes(), "the weight of a convolution")?,
            address(arguments.y, convolution.y.bytes(), "the result of a convolution")?,
        ];
        let workspace = match (self.workspace_bytes, arguments.workspace) {
            (0, _) => 0,
            (bytes, Some(place)) => address(place, bytes, "the working memory of a convolution")?,
            (bytes, None) => {
                return Err(CudaError::Range {
                    action: "the working memory of a convolution",
                    start: 0,
                    end: bytes,
                    size: 0,
                });
            }
        };
        for storage in arguments.storages() {
            storage.take_to(stream)?;
        }
        device.enter()?;
        device.note_launch(&self.label);
        let functions = self.convolver.functions();
        let mut pack = Descriptor::new(functions, descriptor::VARIANT_PACK)?;
        pack.integers(attribute::PACK_UNIQUE_IDS, &TENSORS)?;
        pack.addresses(attribute::PACK_DATA_POINTERS, &addresses)?;
        pack.addresses(attribute::PACK_WORKSPACE, &[workspace])?;
        pack.finalize()?;
        // SAFETY: every tensor's place is as large as the tensor and the working memory as large as the plan
        // says, and they are freed in the order of this stream; the library has taken what it needs of both
        // descriptors when it returns.
        let status = unsafe { (functions.cudnnBackendExecute)(handle, self.plan.raw(), pack.raw()) };
        check(status, "cudnnBackendExecute", || convolution.to_string())
    }

    /// Bytes of working memory that a call needs.
    pub fn workspace_bytes(&self) -> usize {
        self.workspace_bytes
    }

    /// [`Plan::microseconds`].
    pub fn microseconds(&self) -> f32 {
        self.microseconds
    }
}
