//! Libraries are found where the environment says, and a missing one says where it was looked for.
//!
//! Small libraries that the C compiler makes stand for NVIDIA's.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use kiln_cuda::libraries::{CublasLt, Cudnn, Driver, Nvrtc};
use kiln_cuda::{CudaError, Report, Search};

/// A search that looks only where `variables` say.
fn search(variables: &[(&str, &Path)]) -> Search {
    let variables: Vec<(String, OsString)> = variables
        .iter()
        .map(|(name, value)| ((*name).to_owned(), value.as_os_str().to_owned()))
        .collect();
    let value = move |name: &str| {
        variables
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, value)| value.clone())
    };
    Search::new(value, false)
}

/// Makes a library of `source` in `folder`.
fn library(folder: &Path, file: &str, source: &str) -> PathBuf {
    fs::create_dir_all(folder).unwrap();
    let code = folder.join("source.c");
    fs::write(&code, source).unwrap();
    let path = folder.join(file);
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let mut words = compiler.split_whitespace();
    let status = Command::new(words.next().unwrap())
        .args(words)
        .args(["-shared", "-fPIC", "-o"])
        .args([&path, &code])
        .status()
        .expect("a C compiler");
    assert!(status.success());
    path
}

/// All functions that Kiln takes from cuDNN.
const CUDNN: &str = "unsigned long cudnnGetVersion(void) { return 91900; }
int cudnnCreate(void **handle) { return 0; }
int cudnnDestroy(void *handle) { return 0; }
int cudnnSetStream(void *handle, void *stream) { return 0; }
int cudnnBackendCreateDescriptor(int kind, void **descriptor) { return 0; }
int cudnnBackendDestroyDescriptor(void *descriptor) { return 0; }
int cudnnBackendSetAttribute(void *d, int name, int kind, long count, const void *elements) { return 0; }
int cudnnBackendGetAttribute(void *d, int name, int kind, long wanted, long *count, void *to) { return 0; }
int cudnnBackendFinalize(void *descriptor) { return 0; }
int cudnnBackendExecute(void *handle, void *plan, void *pack) { return 0; }";

#[test]
fn a_missing_library_names_every_place_and_the_remedy() {
    let folder = tempfile::tempdir().unwrap();
    let error = Nvrtc::open(&search(&[("KILN_CUDA_PATH", folder.path())])).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, CudaError::MissingLibrary { .. }), "{text}");
    for part in [
        "libnvrtc was not found",
        "pip install nvidia-cuda-nvrtc",
        "libnvrtc.so.13, libnvrtc.so.12, libnvrtc.so",
        &format!("{} (KILN_CUDA_PATH)", folder.path().display()),
        &format!("{}/lib64 (KILN_CUDA_PATH)", folder.path().display()),
        "not set: CUDA_HOME, VIRTUAL_ENV, CONDA_PREFIX",
    ] {
        assert!(text.contains(part), "no `{part}` in:\n{text}");
    }
}

#[test]
fn wheels_of_the_active_python_environment_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let wheel = folder
        .path()
        .join("lib/python3.12/site-packages/nvidia/cudnn/lib");
    let path = library(&wheel, "libcudnn.so.9", CUDNN);
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        let found = Cudnn::open(&search(&[(variable, folder.path())])).unwrap();
        assert_eq!((found.version.as_str(), &found.path), ("9.19.0", &path));
    }
}

#[test]
fn the_users_folder_comes_before_the_toolkit() {
    let folder = tempfile::tempdir().unwrap();
    let (own, toolkit) = (folder.path().join("own"), folder.path().join("toolkit"));
    let first = library(&own.join("lib"), "libcudnn.so", CUDNN);
    let second = library(
        &toolkit.join("lib64"),
        "libcudnn.so.9",
        &CUDNN.replace("91900", "90000"),
    );
    let both = search(&[("KILN_CUDA_PATH", &own), ("CUDA_HOME", &toolkit)]);
    assert_eq!(Cudnn::open(&both).unwrap().path, first);
    let only = search(&[("CUDA_HOME", &toolkit)]);
    assert_eq!(Cudnn::open(&only).unwrap().path, second);
}

#[test]
fn a_library_without_a_function_is_too_old() {
    let folder = tempfile::tempdir().unwrap();
    let path = library(
        folder.path(),
        "libcublasLt.so.12",
        "unsigned long cublasLtGetVersion(void) { return 1; }",
    );
    let error = CublasLt::open(&search(&[("CUDA_HOME", folder.path())])).unwrap_err();
    let text = error.to_string();
    assert!(
        matches!(
            error,
            CudaError::OldLibrary {
                function: "cublasLtCreate",
                ..
            }
        ),
        "{text}"
    );
    assert!(
        text.contains(&path.display().to_string()) && text.contains("CUDA 12.0 or later"),
        "{text}"
    );
}

#[test]
fn a_file_that_is_no_library_is_named_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("libcuda.so.1"), "not a library").unwrap();
    let error = Driver::open(&search(&[("KILN_CUDA_PATH", folder.path())])).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("libcuda.so.1 is there but does not open"), "{text}");
    assert!(text.contains("install NVIDIA's driver"), "{text}");
}

#[test]
fn the_report_says_what_there_is_and_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let path = library(folder.path(), "libcudnn.so.9", CUDNN);
    let text = Report::collect(&search(&[("KILN_CUDA_PATH", folder.path())])).to_string();
    for part in [
        "libcuda     not found: install NVIDIA's driver",
        "libnvrtc    not found: `pip install nvidia-cuda-nvrtc`",
        "libcublasLt not found: `pip install nvidia-cublas`",
        &format!("libcudnn    9.19.0, {}", path.display()),
        "looked in: ",
        "(KILN_CUDA_PATH)",
    ] {
        assert!(text.contains(part), "no `{part}` in:\n{text}");
    }
}
