//! Keeps the results of all runs in `.build/fuzz/report.json`.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::machines::Coverage;
use super::process::Figures;
use crate::{Failure, root};

/// Results by target name, and by state machine name.
#[derive(Default, Serialize, Deserialize)]
struct Report {
    targets: BTreeMap<String, Kept>,
    machines: BTreeMap<String, Coverage>,
}

/// Results of a target's last run, and totals of all runs.
#[derive(Serialize, Deserialize)]
struct Kept {
    total: Total,
    last: Value,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Total {
    runs: u64,
    cpu_seconds: f64,
    executions: u64,
    failures: u64,
}

impl Total {
    fn and(self, figures: &Figures) -> Self {
        Self {
            runs: self.runs + 1,
            cpu_seconds: self.cpu_seconds + figures.cpu.as_secs_f64(),
            executions: self.executions + figures.executions,
            failures: self.failures + u64::from(figures.failure.is_some()),
        }
    }
}

impl Report {
    fn add(&mut self, figures: &[Figures]) {
        for figures in figures {
            let name = figures.target.name.clone();
            let before = self.targets.get(&name).map(|kept| kept.total);
            let total = before.unwrap_or_default().and(figures);
            let last = figures.json();
            self.targets.insert(name, Kept { total, last });
        }
    }
}

/// Adds a run to the report and prints the totals. If a target was not run, its previous values are
/// kept. A report with an older format will be replaced.
pub(super) fn save(
    figures: &[Figures],
    machines: &BTreeMap<String, Coverage>,
) -> Result<(), Failure> {
    let path = root().join(".build/fuzz/report.json");
    let mut report = match fs::read_to_string(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Report::default(),
        Err(error) => return Err(format!("{}: {error}", path.display()).into()),
        Ok(text) => serde_json::from_str(&text).unwrap_or_else(|error| {
            println!("cannot read {}, replacing it: {error}", path.display());
            Report::default()
        }),
    };
    report.add(figures);
    report.machines.clone_from(machines);
    println!(
        "\n{:<22} {:>5} {:>10} {:>13}  in all runs",
        "target", "runs", "CPU s", "executions"
    );
    let mut sum = Total::default();
    for (name, Kept { total, .. }) in &report.targets {
        let Total {
            runs,
            cpu_seconds,
            executions,
            ..
        } = *total;
        println!("{name:<22} {runs:>5} {cpu_seconds:>10.1} {executions:>13}");
        sum.cpu_seconds += cpu_seconds;
        sum.executions += executions;
    }
    println!(
        "{:<28} {:>10.1} {:>13}",
        "all", sum.cpu_seconds, sum.executions
    );
    fs::write(path, serde_json::to_string_pretty(&report)?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::fuzz::targets::TARGETS;

    fn figures(at: usize, executions: u64) -> Figures {
        Figures {
            target: &TARGETS[at],
            cpu: Duration::from_secs(2),
            executions,
            corpus: 1,
            edges: 2,
            all_edges: 3,
            finds: 4,
            crash: None,
            failure: None,
        }
    }

    #[test]
    fn report_adds_runs_and_keeps_rest() {
        let mut report = Report::default();
        report.add(&[figures(0, 10), figures(1, 5)]);
        let text = serde_json::to_string(&report).unwrap();
        let mut report: Report = serde_json::from_str(&text).unwrap();
        report.add(&[figures(0, 7)]);
        let of = |at: usize| &report.targets[&TARGETS[at].name];
        let total = of(0).total;
        assert_eq!(
            (total.runs, total.executions, total.cpu_seconds),
            (2, 17, 4.0)
        );
        assert_eq!(of(0).last["executions"], 7);
        assert_eq!((of(1).total.runs, of(1).total.executions), (1, 5));
    }
}
