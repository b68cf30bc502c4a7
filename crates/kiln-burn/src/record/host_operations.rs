//! Burn's operations that run on the host: the one that reads a value now, and its replacement.
//!
//! Burn's `sort` and its relatives, `one_hot` and `nonzero` fetch the tensor and go on in Rust. The program
//! sees a call of a method like any other, so a graph break names the method: the outermost function of
//! burn-tensor on the stack that is one of these.

use super::location::{is_source_of, of_user};

/// Methods of Burn's tensors that run on the host and have a counterpart of the same name in `kiln::ops`.
const WITH_COUNTERPART: &[&str] = &[
    "argsort",
    "argsort_descending",
    "median",
    "median_with_indices",
    "one_hot",
    "sort",
    "sort_descending",
    "sort_descending_with_indices",
    "sort_with_indices",
    "topk",
    "topk_with_indices",
];

/// Methods that run on the host because the size of their result depends on values.
const WITHOUT_COUNTERPART: &[&str] = &["argwhere", "nonzero"];

/// The method of Burn's tensors that the program called and that reads a value now; none if it is not one
/// of these.
pub fn running() -> Option<&'static str> {
    let mut found = None;
    backtrace::trace(|frame| {
        backtrace::resolve_frame(frame, |symbol| {
            let function = symbol.name().map(|name| format!("{name:#}")).unwrap_or_default();
            let in_burn = match symbol.filename() {
                Some(file) => is_source_of("burn-tensor", &file.to_string_lossy()),
                None => function.contains("burn_tensor"),
            };
            if in_burn {
                // Further out is nearer to the program.
                found = named(&function).or(found);
            }
        });
        of_user(frame).is_none()
    });
    found
}

/// The method that a function of burn-tensor belongs to, by its demangled name.
fn named(function: &str) -> Option<&'static str> {
    // `path::<impl Tensor<B, D>>::sort`, or, inlined, `sort<Kiln, 1, Float>`.
    let last = |path: &str| path.rsplit("::").next().unwrap_or_default().to_owned();
    let names = [
        last(function),
        last(function.split('<').next().unwrap_or_default()),
    ];
    let methods = WITH_COUNTERPART.iter().chain(WITHOUT_COUNTERPART);
    methods
        .copied()
        .find(|method| names.iter().any(|name| name == method))
}

/// What to use in the place of a method of [`running`].
pub fn remedy(method: &str) -> String {
    if WITH_COUNTERPART.contains(&method) {
        return format!(
            "Burn runs `{method}` on the host: use `kiln::ops::{method}`, which stays in the graph"
        );
    }
    format!(
        "the size of what `{method}` gives depends on values, so Burn runs it on the host: compute with a mask in \
         its place (`mask_fill`, `mask_where`)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn methods_are_recognised_by_full_and_by_short_names() {
        let full = "burn_tensor::tensor::api::orderable::<impl burn_tensor::tensor::Tensor<B,_,K>>::sort_with_indices";
        assert_eq!(named(full), Some("sort_with_indices"));
        assert_eq!(
            named("one_hot<burn_router::BackendRouter<K>, 1, burn_backend::Int, 2>"),
            Some("one_hot")
        );
        assert_eq!(
            named("burn_tensor::tensor::api::base::Tensor<B,_,K>::into_data"),
            None
        );
        assert_eq!(named("core::slice::sort_unstable"), None);
        assert!(remedy("median").contains("`kiln::ops::median`"));
        assert!(!remedy("nonzero").contains("kiln::ops"));
    }
}
