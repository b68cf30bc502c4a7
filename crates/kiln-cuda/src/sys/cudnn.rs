//! `libcudnn`: so far its version alone, which `kiln backends` shows.

use super::functions;

functions! {
    /// cuDNN's functions.
    CudnnFunctions
    fn cudnnGetVersion() -> usize;
}
