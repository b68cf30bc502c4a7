//! `KILN_LOG`: each word gives its events, and nothing else does.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};

use burn::tensor::Tensor;
use kiln::{CompileBackend, CompileOptions, Kiln};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use super::{device, train};

/// Keeps what is written.
#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Written {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// A break, a recompile, and a training step that is compiled.
fn program() {
    let options = CompileOptions::default().with_backend(CompileBackend::AotEager);
    let mut region = kiln::compile(options.with_name("logged"));
    for rows in [2, 3] {
        let x = Tensor::<Kiln, 1>::ones([rows], &device());
        region.run(|| x.clone() * x.clone().sum().into_scalar()).unwrap();
    }
    train(CompileOptions::default().with_name("logged"), 3);
}

/// What the program logs under `KILN_LOG=text`.
fn logged(text: &str) -> Vec<String> {
    let written = Written::default();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(kiln::log::filter(text)))
        .with_writer(written.clone())
        .with_ansi(false)
        .finish();
    tracing::subscriber::with_default(subscriber, program);
    let bytes = written.0.lock().unwrap().clone();
    String::from_utf8(bytes)
        .unwrap()
        .lines()
        .map(str::to_owned)
        .collect()
}

#[test]
fn every_word_has_its_events() {
    // So that the words for what is compiled see steps that the disk cache had, too.
    program();
    for (word, _) in kiln::log::WORDS {
        let lines = logged(word);
        assert!(!lines.is_empty(), "KILN_LOG={word} says nothing");
        for line in &lines {
            assert!(
                line.contains(&format!("kiln::{word}: ")),
                "KILN_LOG={word} says {line}"
            );
        }
    }
}

#[test]
fn a_partition_is_one_line_with_its_numbers() {
    let lines = logged("partition");
    assert_eq!(lines.len(), 1, "{lines:?}");
    for part in [
        "kept_bytes=",
        "read_bytes=",
        "keep=",
        "computes again: ",
        "step=\"logged\"",
    ] {
        assert!(lines[0].contains(part), "{part} is missing in {}", lines[0]);
    }
}

#[test]
fn without_a_word_nothing_is_said() {
    assert_eq!(logged(""), Vec::<String>::new());
}

#[test]
fn the_recompile_limit_names_the_dimension() {
    let written = Written::default();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new("kiln::recompiles=warn"))
        .with_writer(written.clone())
        .with_ansi(false)
        .finish();
    tracing::subscriber::with_default(subscriber, || {
        let options = CompileOptions::default()
            .with_backend(CompileBackend::Interpret)
            .with_recompile_limit(2);
        let mut region = kiln::compile(options);
        for length in [4, 7, 9] {
            let x = Tensor::<Kiln, 2>::ones([3, length], &device());
            region.run(|| x.exp()).unwrap();
        }
    });
    let text = String::from_utf8(written.0.lock().unwrap().clone()).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains("recompile limit of 2 reached"), "{text}");
    assert!(
        text.contains("dimension 1 (3 sizes: 4, 7, 9) of input 0") && text.contains("pad it"),
        "{text}"
    );
}
