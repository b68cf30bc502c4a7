pub use super::*;

/// The device on which Burn's tests put tensors with gradients; here the backend decides about gradients,
/// and the device is the plain one.
pub struct AutodiffDevice;

impl AutodiffDevice {
    #[expect(clippy::new_ret_no_self)]
    pub fn new() -> burn_tensor::Device<Inner> {
        Default::default()
    }
}

#[path = "../autodiff/mod.rs"]
mod tests;
