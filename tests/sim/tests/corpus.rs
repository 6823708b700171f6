//! Plans that have found a bug. Each file describes the reason.

use std::path::Path;

use riser_sim::{Plan, run};

#[test]
fn corpus_plans_pass() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    let files = std::fs::read_dir(directory).unwrap();
    let mut files: Vec<_> = files.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty());
    let fails = |file: &Path| {
        let text = std::fs::read_to_string(file).unwrap();
        let result = Plan::parse(&text).map(|plan| run(&plan));
        match result {
            Err(error) => Some(format!("{}: {error}", file.display())),
            Ok(Err(failure)) => Some(format!("{}: {failure}", file.display())),
            Ok(Ok(_)) => None,
        }
    };
    let failures: Vec<_> = files.iter().filter_map(|file| fails(file)).collect();
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
}
