//! The line of the user's program that is running now.
//!
//! It is taken from a backtrace: the innermost frame that belongs neither to a crate of the registry
//! (Burn), nor to Kiln, nor to the standard library. This is done for graph breaks and for recordings that
//! are going to be compiled (there each return address is looked up only once, [`super::sighting`]); not
//! for each operation of each step.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A line of source.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Location {
    /// The file, as the compiler was given it.
    pub file: PathBuf,
    /// The line, from 1; none if the program carries no line tables.
    pub line: Option<u32>,
    /// The function.
    pub function: String,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}", shown(&self.file).display()),
            None => write!(
                f,
                "{} (build with debug = \"line-tables-only\" for the line)",
                self.function
            ),
        }
    }
}

/// Crates whose frames are not the user's.
const INNER: &[&str] = &[
    "alloc",
    "backtrace",
    "burn_autodiff",
    "burn_backend",
    "burn_core",
    "burn_flex",
    "burn_ir",
    "burn_nn",
    "burn_optim",
    "burn_router",
    "burn_std",
    "burn_tensor",
    "burn_train",
    "core",
    "cubecl_common",
    "futures_lite",
    "kiln",
    "kiln_burn",
    "pollster",
    "rayon",
    "rayon_core",
    "std",
];

/// The current line of the user's program; none if no frame is the user's.
pub fn user_location() -> Option<Location> {
    let mut found = None;
    backtrace::trace(|frame| {
        found = of_user(frame);
        found.is_none()
    });
    found
}

/// The user's line in a frame; none if the function and everything inlined into it belong to others.
pub(super) fn of_user(frame: &backtrace::Frame) -> Option<Location> {
    let mut found = None;
    backtrace::resolve_frame(frame, |symbol| {
        if found.is_none() {
            found = of_symbol(symbol);
        }
    });
    found
}

/// The line of a symbol, if it is the user's.
pub(super) fn of_symbol(symbol: &backtrace::Symbol) -> Option<Location> {
    let function = symbol.name().map(|name| format!("{name:#}")).unwrap_or_default();
    // With line tables the file decides, because inlined functions have short names there; without, the
    // function.
    let inner = match symbol.filename() {
        Some(file) => is_inner_file(&file.to_string_lossy()),
        None => is_inner(&function),
    };
    let file = || symbol.filename().map(PathBuf::from).unwrap_or_default();
    (!inner).then(|| Location {
        file: file(),
        line: symbol.lineno(),
        function,
    })
}

/// `file:line`, the file as [`shown`]; empty without line tables.
pub(super) fn text(location: &Location) -> Arc<str> {
    match location.line {
        Some(line) => format!("{}:{line}", shown(&location.file).display()).into(),
        None => "".into(),
    }
}

/// A file as people read it: relative to the working folder if it is below it.
fn shown(file: &Path) -> &Path {
    let below = |folder: std::io::Result<PathBuf>| {
        let folder = folder.ok().filter(|folder| folder.is_absolute())?;
        file.strip_prefix(folder).ok()
    };
    // The compiler may have been started in a folder by another name than the kernel's: through a link.
    let named = || {
        std::env::var_os("PWD")
            .map(PathBuf::from)
            .ok_or(std::io::ErrorKind::NotFound.into())
    };
    let file = below(std::env::current_dir())
        .or_else(|| below(named()))
        .unwrap_or(file);
    file.strip_prefix(".").unwrap_or(file)
}

/// Whether a source file is the standard library's, a registry crate's, Burn's or Kiln's, wherever these are:
/// they may be copied into a project, as `cargo vendor` does, or come from a repository.
fn is_inner_file(file: &str) -> bool {
    let file = file.replace('\\', "/");
    if ["/rustc/", "/rustlib/src/", "/registry/src/"]
        .iter()
        .any(|part| file.contains(part))
    {
        return true;
    }
    let folders: Vec<&str> = file.split('/').collect();
    let sources = folders.iter().enumerate().filter(|(_, folder)| **folder == "src");
    let mut above =
        sources.filter_map(|(at, _)| Some((at.checked_sub(1)?, folders.get(at.wrapping_sub(1))?)));
    above.any(|(at, folder)| match without_version(folder) {
        // A folder may have such a name because a user's program has.
        "kiln" => at > 0 && ["crates", "vendor"].contains(&folders[at - 1]),
        krate => krate.contains('-') && INNER.contains(&&*krate.replace('-', "_")),
    })
}

/// The name of a crate, of the name of a folder such as `burn-tensor-0.21.0`.
fn without_version(folder: &str) -> &str {
    match folder.rsplit_once('-') {
        Some((krate, version)) if version.starts_with(|c: char| c.is_ascii_digit()) => krate,
        _ => folder,
    }
}

/// Whether `file` is a source of the crate `krate`, whose name has dashes.
pub(super) fn is_source_of(krate: &str, file: &str) -> bool {
    let mut folders = file
        .split(['/', '\\'])
        .rev()
        .skip_while(|folder| *folder != "src")
        .skip(1);
    folders
        .next()
        .is_some_and(|folder| without_version(folder) == krate)
}

/// Whether a demangled function belongs to [`INNER`], or to no crate at all (`main` of C, `__rust_try`).
fn is_inner(function: &str) -> bool {
    // `<burn_tensor::Tensor<B> as core::Clone>::clone`: what counts is the type before `as`.
    let path = function
        .trim_start_matches(['<', '&'])
        .trim_start_matches("dyn ")
        .trim_start_matches("mut ");
    match path.split_once("::") {
        Some((krate, _)) => INNER.contains(&krate),
        None => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_below_the_working_folder_are_shown_relative_to_it() {
        let location = |file: PathBuf| Location {
            file,
            line: Some(7),
            function: String::new(),
        };
        let below = location(std::env::current_dir().unwrap().join("src/model.rs"));
        assert_eq!(below.to_string(), "src/model.rs:7");
        assert_eq!(&*text(&below), "src/model.rs:7");
        assert_eq!(location("./src/model.rs".into()).to_string(), "src/model.rs:7");
        assert_eq!(
            location("/elsewhere/model.rs".into()).to_string(),
            "/elsewhere/model.rs:7"
        );
    }

    #[test]
    fn frames_of_libraries_are_not_the_users() {
        assert!(is_inner(
            "<burn_tensor::tensor::api::base::Tensor<B, _> as core::clone::Clone>::clone"
        ));
        assert!(is_inner("std::panicking::try"));
        assert!(is_inner("main"));
        assert!(is_inner_file("./crates/kiln-burn/src/record/session.rs"));
        assert!(is_inner_file(
            "/home/me/.cargo/registry/src/index/burn-tensor-0.21.0/src/tensor/api/base.rs"
        ));
        for inner in [
            "/nix/store/rust/lib/rustlib/src/rust/library/core/src/ops/function.rs",
            "vendor/burn-autodiff/src/ops/tensor.rs",
            "/build/vendor/burn-tensor-0.21.0/src/tensor/api/base.rs",
            "/home/me/.cargo/git/checkouts/burn-1f/2e/crates/burn-router/src/ops/op_float.rs",
            "/home/me/kiln/crates/kiln/src/region.rs",
            "vendor/kiln/src/region.rs",
        ] {
            assert!(is_inner_file(inner), "{inner}");
        }
        for own in [
            "src/main.rs",
            "/home/me/my-kiln/src/lib.rs",
            "/home/me/kiln/src/main.rs",
            "/home/me/project/core/src/model.rs",
            "/home/me/burn-models/src/llama.rs",
        ] {
            assert!(!is_inner_file(own), "{own}");
        }
        assert!(is_source_of(
            "burn-tensor",
            "vendor/burn-tensor/src/tensor/api/sort.rs"
        ));
        assert!(is_source_of(
            "burn-tensor",
            r"C:\registry\src\i\burn-tensor-0.21.0\src\lib.rs"
        ));
        assert!(!is_source_of(
            "burn-tensor",
            "vendor/burn-tensor-testgen/src/lib.rs"
        ));
        assert!(!is_inner("my_model::train::step::{{closure}}"));
        assert!(!is_inner("<my_model::Net as burn_core::module::Module>::map"));
    }
}
