pub use burn_tensor_testgen::might_panic;
