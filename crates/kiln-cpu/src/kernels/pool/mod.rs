//! Pooling and its gradients: of channels-first images plane by plane ([`planes`]), of images of any other
//! layout with vectors along the channels ([`channels`]).

pub mod channels;
pub mod planes;

pub use planes::{ConsumePooled, PoolGeometry, PoolKind, PoolSpec, forward, input_grad, workspace};
