//! From C source to results: building, loading, calling, and every way it can fail.

use std::cell::RefCell;
use std::ffi::c_void;

use kiln_cpu::{
    AlignedBuffer, BuildOptions, CpuError, KernelEvent, Library, NoHooks, Objects, OptLevel, Signature,
    SourceFile, Step, StepArguments, StepHooks, ThreadPool, Toolchain,
};

/// `out[i] = a[i] * scalar + i`, in parallel, through a second file.
fn axpy(n: usize) -> Vec<SourceFile> {
    let signature = Signature::new(1, 1, 1, 64).to_c();
    let entry = format!(
        r#"#include "kiln_runtime.h"
{signature}
void kiln_axpy(void *ctx, int64_t begin, int64_t end, int thread);
int kiln_step(const kiln_runtime *rt, void *const *inputs, void *const *outputs, void *arena,
              const uint64_t *scalars) {{
    void *ctx[3] = {{inputs[0], outputs[0], (void *)scalars}};
    *(uint64_t *)arena = scalars[0];
    if (rt->kernel_event) rt->kernel_event(rt->pool, 3, 1);
    rt->parallel_for(rt->pool, {n}, 16, kiln_axpy, ctx);
    if (rt->kernel_event) rt->kernel_event(rt->pool, 3, 0);
    return 0;
}}
"#
    );
    let kernel = r#"#include "kiln_runtime.h"
void kiln_axpy(void *ctx, int64_t begin, int64_t end, int thread) {
    const float *a = ((void **)ctx)[0];
    float *out = ((void **)ctx)[1];
    double scale = *(double *)((void **)ctx)[2];
    for (int64_t i = begin; i < end; i++) out[i] = a[i] * (float)scale + (float)i;
}
"#;
    vec![
        SourceFile::new("entry.c", entry),
        SourceFile::new("axpy.c", kernel),
    ]
}

fn build(files: &[SourceFile]) -> Step {
    let toolchain = Toolchain::detect().unwrap();
    let built = toolchain.build(files, &BuildOptions::default()).unwrap();
    Library::load(built.path()).unwrap().step()
}

fn run(
    step: &Step,
    pool: &ThreadPool,
    a: &[f32],
    scale: f64,
    hooks: &dyn StepHooks,
) -> Result<Vec<f32>, CpuError> {
    let mut out = vec![0f32; a.len()];
    let mut arena = AlignedBuffer::zeroed(64).unwrap();
    let arguments = StepArguments {
        inputs: &[a.as_ptr().cast()],
        outputs: &[out.as_mut_ptr().cast()],
        arena: &mut arena,
        scalars: &[scale.to_bits()],
    };
    // SAFETY: one input and one output of the length the source was generated for.
    unsafe { step.run(pool, arguments, hooks) }?;
    Ok(out)
}

#[test]
fn a_step_computes_the_same_on_any_number_of_threads() {
    let n = 1003;
    let step = build(&axpy(n));
    assert_eq!(step.signature(), &Signature::new(1, 1, 1, 64));
    let a: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin()).collect();
    for scale in [2.5, -1.0] {
        let expected: Vec<f32> = a
            .iter()
            .enumerate()
            .map(|(i, a)| a * scale as f32 + i as f32)
            .collect();
        for threads in [1, 2, 5] {
            let pool = ThreadPool::new(threads);
            assert_eq!(run(&step, &pool, &a, scale, &NoHooks).unwrap(), expected);
        }
    }
}

#[test]
fn profiling_sees_each_kernel() {
    struct Profile(RefCell<Vec<(usize, KernelEvent)>>);
    impl StepHooks for Profile {
        fn call_extern(&self, _: usize, _: *mut *mut c_void) -> Result<(), String> {
            Err("none".into())
        }
        fn wants_events(&self) -> bool {
            true
        }
        fn kernel_event(&self, kernel: usize, event: KernelEvent) {
            self.0.borrow_mut().push((kernel, event));
        }
    }
    let profile = Profile(RefCell::default());
    run(&build(&axpy(8)), &ThreadPool::new(1), &[0.0; 8], 1.0, &profile).unwrap();
    assert_eq!(
        profile.0.into_inner(),
        [(3, KernelEvent::Begin), (3, KernelEvent::End)]
    );
}

#[test]
fn a_step_nobody_profiles_reads_no_clock() {
    /// Hooks that would get the events of every kernel and piece, but do not ask for them.
    struct Indifferent;
    impl StepHooks for Indifferent {
        fn call_extern(&self, _: usize, _: *mut *mut c_void) -> Result<(), String> {
            Err("none".into())
        }
        fn kernel_event(&self, _: usize, _: KernelEvent) {
            panic!("the step called back");
        }
        fn piece_event(&self, _: usize, _: usize, _: u64, _: u64) {
            panic!("a piece was timed");
        }
    }
    // The step itself says whether it was given a callback for events: the only thing that reads clocks.
    let text = format!(
        r#"#include "kiln_runtime.h"
{}
int kiln_step(const kiln_runtime *rt, void *const *inputs, void *const *outputs, void *arena,
              const uint64_t *scalars) {{
    *(float *)outputs[0] = rt->kernel_event ? 1 : 2;
    return 0;
}}
"#,
        Signature::new(1, 1, 1, 0).to_c()
    );
    let step = build(&[SourceFile::new("step.c", text)]);
    let out = run(&step, &ThreadPool::new(2), &[0.0; 8], 1.0, &Indifferent).unwrap();
    assert_eq!(out[0], 2.0, "no callback for events");
    run(
        &build(&axpy(64)),
        &ThreadPool::new(2),
        &[0.0; 64],
        1.0,
        &Indifferent,
    )
    .unwrap();
}

/// A step that hands its input and output to operation 4 outside.
fn outside() -> Vec<SourceFile> {
    let text = format!(
        r#"#include "kiln_runtime.h"
{}
int kiln_step(const kiln_runtime *rt, void *const *inputs, void *const *outputs, void *arena,
              const uint64_t *scalars) {{
    void *buffers[2] = {{inputs[0], outputs[0]}};
    if (rt->call_extern(rt->pool, 4, buffers)) return 1 + 4;
    return 0;
}}
"#,
        Signature::new(1, 1, 1, 0).to_c()
    );
    vec![SourceFile::new("step.c", text)]
}

#[test]
fn operations_outside_the_step_run_fail_and_panic_in_order() {
    struct Outside(&'static str);
    impl StepHooks for Outside {
        fn call_extern(&self, index: usize, buffers: *mut *mut c_void) -> Result<(), String> {
            match self.0 {
                "fail" => Err(format!("operation {index} has no kernel")),
                "panic" => panic!("index out of range"),
                _ => {
                    // SAFETY: the step above passes one input and one output of four floats.
                    unsafe {
                        let (input, output) = (*buffers, *buffers.add(1));
                        output.cast::<f32>().copy_from(input.cast::<f32>(), 4);
                    }
                    Ok(())
                }
            }
        }
    }
    let (step, pool) = (build(&outside()), ThreadPool::new(2));
    let a = [1.0, 2.0, 3.0, 4.0];
    assert_eq!(run(&step, &pool, &a, 0.0, &Outside("copy")).unwrap(), a);
    for (behaviour, expected) in [
        ("fail", "operation 4 has no kernel"),
        ("panic", "index out of range"),
    ] {
        let error = run(&step, &pool, &a, 0.0, &Outside(behaviour)).unwrap_err();
        assert!(matches!(error, CpuError::Extern { index: 4, .. }), "{error}");
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert_eq!(
        run(&step, &pool, &a, 0.0, &Outside("copy")).unwrap(),
        a,
        "usable after a failure"
    );
}

#[test]
fn wrong_arguments_are_errors_before_anything_runs() {
    let (step, pool) = (build(&axpy(4)), ThreadPool::new(1));
    let mut out = [0f32; 4];
    let mut arena = AlignedBuffer::zeroed(64).unwrap();
    let mut small = AlignedBuffer::zeroed(8).unwrap();
    let input = [1f32; 4];
    let (inputs, outputs) = ([input.as_ptr().cast::<u8>()], [out.as_mut_ptr().cast::<u8>()]);
    let call = |inputs: &[*const u8], outputs: &[*mut u8], arena: &mut AlignedBuffer, scalars: &[u64]| {
        let arguments = StepArguments {
            inputs,
            outputs,
            arena,
            scalars,
        };
        // SAFETY: pointers to four floats; wrong counts are refused.
        unsafe { step.run(&pool, arguments, &NoHooks) }
            .unwrap_err()
            .to_string()
    };
    assert!(call(&[], &outputs, &mut arena, &[0]).contains("expects 1 inputs, was given 0"));
    assert!(call(&inputs, &[], &mut arena, &[0]).contains("expects 1 outputs, was given 0"));
    assert!(call(&inputs, &outputs, &mut arena, &[]).contains("expects 1 scalars, was given 0"));
    assert!(call(&inputs, &outputs, &mut small, &[0]).contains("expects 64 arena bytes, was given 8"));
    assert_eq!(out, [0.0; 4]);
}

#[test]
fn no_compiler_names_the_remedy() {
    let error = Toolchain::from_candidates(&["/nonexistent/cc", "false"]).unwrap_err();
    assert!(matches!(error, CpuError::NoCompiler { .. }));
    let text = error.to_string();
    for part in [
        "/nonexistent/cc",
        "false",
        "install gcc or clang",
        "CC",
        "aot_eager",
    ] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
}

#[test]
fn a_rejected_source_is_kept_with_the_compilers_words() {
    let files = [
        SourceFile::new("good.c", "int good;\n"),
        SourceFile::new("bad.c", "int bad = ;\n"),
    ];
    let error = Toolchain::detect()
        .unwrap()
        .build(&files, &BuildOptions::default())
        .unwrap_err();
    let CpuError::Compile {
        file, stderr, folder, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(file, "bad.c");
    assert!(stderr.contains("bad.c:1"), "{stderr}");
    assert_eq!(
        std::fs::read_to_string(folder.join("bad.c")).unwrap(),
        "int bad = ;\n"
    );
    assert!(folder.join("kiln_runtime.h").exists());
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn what_was_compiled_once_is_not_compiled_again() {
    let toolchain = Toolchain::detect().unwrap();
    let objects = Objects::default();
    let add = |amount: &str| {
        SourceFile::new(
            "add.c",
            format!("#include \"amount.h\"\nfloat added(float x) {{ return x + {amount}; }}\n"),
        )
    };
    let header = |amount: &str| SourceFile::new("amount.h", format!("#define AMOUNT {amount}\n"));
    let step = |factor: &str| {
        let text = format!(
            "#include \"kiln_runtime.h\"\n{}float added(float x);\nint kiln_step(const kiln_runtime *rt, void *const *i, void \
             *const *o, void *a, const uint64_t *s) {{ *(float *)o[0] = added(*(const float *)i[0]) * {factor}; return 0; }}\n",
            Signature::new(1, 1, 0, 0).to_c()
        );
        SourceFile::new("step.c", text)
    };
    let quick = BuildOptions {
        level: OptLevel::Quick,
        ..BuildOptions::default()
    };
    let full = BuildOptions::default();
    // Amount, factor, how often the header's amount, options; then files compiled and the result for 1.
    let cases = [
        (add("AMOUNT"), header("2"), step("10"), &full, 2, 30.0),
        (add("AMOUNT"), header("2"), step("20"), &full, 1, 60.0),
        (add("AMOUNT"), header("2"), step("10"), &full, 0, 30.0),
        (add("AMOUNT"), header("3"), step("10"), &full, 2, 40.0),
        (add("1"), header("3"), step("10"), &full, 1, 20.0),
        (add("1"), header("3"), step("10"), &quick, 2, 20.0),
    ];
    for (number, (add, header, step, options, compiled, expected)) in cases.into_iter().enumerate() {
        let built = toolchain
            .build_reusing(&[add, header, step], options, &objects)
            .unwrap();
        assert_eq!(built.compiled, compiled, "case {number}");
        let library = Library::load(built.path()).unwrap();
        let (input, mut output) = (1.0f32, 0.0f32);
        let mut arena = AlignedBuffer::zeroed(0).unwrap();
        let arguments = StepArguments {
            inputs: &[(&raw const input).cast()],
            outputs: &[(&raw mut output).cast()],
            arena: &mut arena,
            scalars: &[],
        };
        // SAFETY: one float in, one float out, as the source reads and writes.
        unsafe { library.step().run(&ThreadPool::new(1), arguments, &NoHooks) }.unwrap();
        assert_eq!(output, expected, "case {number}");
    }
}

#[test]
fn an_unresolved_symbol_is_an_error() {
    let text = format!(
        "#include \"kiln_runtime.h\"\n{}void nowhere(void);\nint kiln_step(const kiln_runtime *rt, void *const *i, \
         void *const *o, void *a, const uint64_t *s) {{ nowhere(); return 0; }}\n",
        Signature::new(0, 0, 0, 0).to_c()
    );
    let toolchain = Toolchain::detect().unwrap();
    // On Linux linking finds that it is missing, elsewhere loading does.
    let error = toolchain
        .build(&[SourceFile::new("step.c", text)], &BuildOptions::default())
        .and_then(|built| Library::load(built.path()))
        .unwrap_err();
    assert!(error.to_string().contains("nowhere"), "{error}");
}

#[test]
fn a_file_that_is_no_step_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("step.so");
    std::fs::write(&path, b"not an object").unwrap();
    assert!(matches!(Library::load(&path), Err(CpuError::Load { .. })));
}

#[test]
fn the_toolchain_describes_itself() {
    let toolchain = Toolchain::detect().unwrap();
    assert!(toolchain.identity().contains(toolchain.version()));
    assert!(
        toolchain.version().chars().any(|c| c.is_ascii_digit()),
        "{}",
        toolchain.version()
    );
    #[cfg(target_arch = "x86_64")]
    {
        let wide = std::arch::is_x86_feature_detected!("avx512vl");
        assert_eq!(toolchain.isa().is_avx512(), wide, "{}", toolchain.isa());
    }
}
