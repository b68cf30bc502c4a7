//! `explain`: a region's history as text.

use std::fmt;

use kiln_burn::RegionReport;

/// What a region compiled, why, and what cut it. Prints as text.
#[derive(Clone, Debug)]
pub struct Explain {
    report: RegionReport,
}

impl Explain {
    pub(crate) fn new(report: RegionReport) -> Self {
        Self { report }
    }

    /// The numbers.
    pub fn report(&self) -> &RegionReport {
        &self.report
    }
}

impl fmt::Display for Explain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = &self.report;
        writeln!(
            f,
            "region `{}`: {} calls, {} compiled steps, {} graph breaks, {} recompiles",
            report.name,
            report.calls,
            report.steps.len(),
            report.breaks.len(),
            report.recompiles.len()
        )?;
        for step in &report.steps {
            writeln!(
                f,
                "  segment {} on {}: {} operations, {} nodes, {} inputs, {} outputs ({} in place), {} runtime scalars; \
                 compiled in {:.1?}, ran {} times in {:.1?}",
                step.segment,
                step.backend,
                step.operations,
                step.nodes,
                step.inputs,
                step.outputs,
                step.aliased,
                step.scalars,
                step.compile_time,
                step.runs,
                step.run_time
            )?;
            if !step.externs.is_empty() {
                writeln!(f, "    kept whole, run on burn-flex: {}", counted(&step.externs))?;
            }
            for line in step.details.lines() {
                writeln!(f, "    {line}")?;
            }
        }
        for (graph_break, times) in &report.breaks {
            writeln!(f, "  graph break, {times} times: {graph_break}")?;
        }
        for recompile in &report.recompiles {
            writeln!(
                f,
                "  recompiled segment {}: {}",
                recompile.segment, recompile.mismatch
            )?;
        }
        Ok(())
    }
}

/// `a, b (2 times)`: names in order of first occurrence.
fn counted(names: &[String]) -> String {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for name in names {
        match counts.iter_mut().find(|(known, _)| known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    let show = |&(name, count): &(&str, usize)| {
        if count == 1 {
            name.to_owned()
        } else {
            format!("{name} ({count} times)")
        }
    };
    counts.iter().map(show).collect::<Vec<_>>().join(", ")
}
