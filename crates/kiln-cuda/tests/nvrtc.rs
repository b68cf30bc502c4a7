//! NVRTC compiles on a machine without a GPU; where it is missing these tests say so and pass.

mod common;

use std::num::NonZero;

use kiln_cuda::CudaError;
use kiln_cuda::build::{CacheFolder, Compiler, Source, Store, code_store};

fn source(name: &str, body: &str) -> Source {
    Source {
        name: name.to_owned(),
        text: format!("extern \"C\" __global__ void {name}(float* x, int n)\n{{\n  {body}\n}}\n"),
    }
}

/// A cubin is an ELF file for CUDA (machine number 190).
fn is_cubin(image: &[u8]) -> bool {
    image.starts_with(b"\x7fELF") && u16::from_le_bytes([image[18], image[19]]) == 190
}

#[test]
fn machine_code_comes_out_for_several_generations() {
    let Some(nvrtc) = common::nvrtc() else { return };
    for (capability, name) in [((8, 0), "sm_80"), ((8, 9), "sm_89"), ((9, 0), "sm_90a")] {
        let compiler = Compiler::new(nvrtc.clone(), capability, Store::disabled()).unwrap();
        assert_eq!(compiler.architecture().name(), name);
        let cubins = compiler
            .compile(&[source("twice", "if (threadIdx.x < n) x[threadIdx.x] *= 2;")])
            .unwrap();
        assert!(is_cubin(&cubins[0].image), "{name}");
    }
}

#[test]
fn a_device_that_is_newer_than_nvrtc_is_named() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let version = nvrtc.version.clone();
    let error = Compiler::new(nvrtc, (99, 0), Store::disabled()).unwrap_err();
    let expected = format!("NVRTC {version} compiles for nothing that runs on compute capability 99.0");
    assert!(error.to_string().starts_with(&expected), "{error}");
}

#[test]
fn an_error_shows_the_line_of_the_source() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let compiler = Compiler::new(nvrtc, (9, 0), Store::disabled()).unwrap();
    let good = source("good", "x[0] = 1;");
    let error = compiler.compile(&[good, source("bad", "x[0] = y;")]).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, CudaError::Compile { .. }), "{text}");
    assert!(
        text.starts_with("NVRTC rejects the source `bad` for sm_90a:\nbad(3): error:"),
        "{text}"
    );
    assert!(text.contains("     3 |   x[0] = y;"), "{text}");
}

#[test]
fn many_sources_come_back_in_order_and_equal_ones_are_compiled_once() {
    let Some(nvrtc) = common::nvrtc() else { return };
    let folder = tempfile::tempdir().unwrap();
    let threads = NonZero::new(3).unwrap();
    let compiler = || {
        let cache = code_store(&CacheFolder::at(folder.path(), 1 << 30));
        Compiler::new(nvrtc.clone(), (9, 0), cache)
            .unwrap()
            .with_threads(threads)
    };
    let names = ["a", "b", "a", "c", "b", "d"];
    let sources: Vec<Source> = names.iter().map(|name| source(name, "x[0] += n;")).collect();
    let cubins = compiler().compile(&sources).unwrap();
    for (name, cubin) in names.iter().zip(&cubins) {
        assert!(is_cubin(&cubin.image) && !cubin.cached);
        // The image names its kernel.
        let section = format!(".text.{name}");
        assert!(
            cubin
                .image
                .windows(section.len())
                .any(|part| part == section.as_bytes()),
            "{name}"
        );
    }
    let files = || {
        CacheFolder::at(folder.path(), 1 << 30).list().unwrap()[0]
            .entries
            .len()
    };
    assert_eq!(files(), 4);
    let again = compiler().compile(&sources).unwrap();
    assert!(again.iter().all(|cubin| cubin.cached));
    assert!(
        again
            .iter()
            .zip(&cubins)
            .all(|(one, other)| one.image == other.image)
    );
    // Another option is another key.
    let fast = compiler()
        .with_option("--use_fast_math")
        .compile(&sources[..1])
        .unwrap();
    assert!(!fast[0].cached);
    assert_eq!(files(), 5);
}
