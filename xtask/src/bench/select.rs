//! Selects table rows and columns using words on the command line.

use super::compare::Selection;
use super::systems::SYSTEMS;
use super::targets::TARGETS;
use super::workloads::WORKLOADS;
use crate::Failure;

/// Selects all systems and workloads whose names contain one of the words. If no word matches a
/// system, all systems are used, and the same for workloads. Also selects the systems used for
/// comparison.
pub(super) fn of(words: &[String]) -> Result<Selection, Failure> {
    let has = |id: &str| words.iter().any(|word| id.contains(word.as_str()));
    // An unknown word must be an error, because it would select everything.
    for word in words {
        let ids = || {
            SYSTEMS
                .iter()
                .map(|s| s.id)
                .chain(WORKLOADS.iter().map(|w| w.id))
        };
        if !ids().any(|id| id.contains(word.as_str())) {
            let all: Vec<_> = ids().collect();
            return Err(format!("unknown name {word}: expected one of {}", all.join(", ")).into());
        }
    }
    let is_any_system = !SYSTEMS.iter().any(|system| has(system.id));
    let is_any_workload = !WORKLOADS.iter().any(|workload| has(workload.id));
    let is_peer = |id: &str| {
        let mut targets = TARGETS.iter().copied();
        targets.any(|target| target.baseline == id && has(target.system))
    };
    let systems = SYSTEMS.iter();
    let workloads = WORKLOADS.iter();
    Ok(Selection {
        systems: systems
            .filter(|system| is_any_system || has(system.id) || is_peer(system.id))
            .collect(),
        workloads: workloads
            .filter(|workload| is_any_workload || has(workload.id))
            .collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(words: &[&str]) -> (Vec<&'static str>, Vec<&'static str>) {
        let words: Vec<_> = words.iter().map(|word| (*word).to_owned()).collect();
        let selection = of(&words).unwrap();
        let systems = selection.systems.iter().map(|system| system.id);
        let workloads = selection.workloads.iter().map(|workload| workload.id);
        (systems.collect(), workloads.collect())
    }

    #[test]
    fn words_select_rows_and_columns_apart() {
        let (systems, workloads) = selected(&[]);
        assert_eq!(
            (systems.len(), workloads.len()),
            (SYSTEMS.len(), WORKLOADS.len())
        );
        let (systems, workloads) = selected(&["iser", "randread"]);
        assert_eq!(systems, ["nbdkit", "iser"]);
        assert_eq!(workloads, ["randread-4k-1", "randread-4k-32"]);
        let (systems, workloads) = selected(&["iscsi-perf"]);
        assert_eq!(systems, ["tgt", "iscsi-perf"]);
        assert_eq!(workloads.len(), WORKLOADS.len());
    }

    #[test]
    fn unknown_selection_word_is_error() {
        let error = of(&["nope".to_owned()]).err().unwrap().to_string();
        assert!(
            error.starts_with("unknown name nope: expected one of file, nbdkit"),
            "{error}"
        );
    }
}
