//! The corpus in the repository, which contains seeds and the inputs with the best coverage that
//! were found by the fuzzer.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::process::{command, relative, work_dir};
use super::targets::Target;
use crate::Failure;

/// Maximum number of inputs to keep for a target in addition to the seeds, and the maximum input
/// size in bytes.
const MOST: usize = 12;
const LONGEST: u64 = 4096;

/// Maximum number of failing inputs before we return an error.
const FAILURES: usize = 20;

/// An input and the edges covered by it.
struct Input {
    path: PathBuf,
    len: u64,
    edges: BTreeSet<u64>,
}

/// Updates the inputs that were found for a target: from the existing inputs and the working
/// corpus, we choose a minimal set with the same coverage, not including edges already covered by
/// seeds. Returns the number of inputs.
pub(super) fn minimize(program: &Path, target: &Target) -> Result<usize, Failure> {
    let committed = target.directory().join("corpus");
    let mut files = files(&committed)?;
    files.extend(self::files(&work_dir(target).join("corpus"))?);
    let inputs = reached(program, target, files)?;
    let is_seed = |input: &Input| input.path.starts_with(&committed) && !is_found(&input.path);
    let (seeds, others): (Vec<_>, Vec<_>) = inputs.into_iter().partition(is_seed);
    let chosen = choose(&seeds, others);
    let mut contents = Vec::new();
    for input in &chosen {
        contents.push(fs::read(&input.path)?);
    }
    for file in self::files(&committed)?
        .iter()
        .filter(|file| is_found(file))
    {
        fs::remove_file(file)?;
    }
    for (number, bytes) in contents.iter().enumerate() {
        fs::write(committed.join(format!("found-{number:02}")), bytes)?;
    }
    Ok(contents.len())
}

fn is_found(path: &Path) -> bool {
    let name = path.file_name().map(|name| name.to_string_lossy());
    name.is_some_and(|name| name.starts_with("found-"))
}

fn files(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten() {
        let entry = entry?;
        files.push((entry.metadata()?.len(), entry.path()));
    }
    files.sort();
    Ok(files.into_iter().map(|(_, path)| path).collect())
}

/// Chooses inputs with a greedy algorithm: the next input is always the one covering the most new
/// edges. If there are several, we use the shortest.
fn choose(seeds: &[Input], mut others: Vec<Input>) -> Vec<Input> {
    let mut reached: BTreeSet<u64> = seeds.iter().flat_map(|i| &i.edges).copied().collect();
    others.retain(|input| input.len <= LONGEST);
    let mut chosen = Vec::new();
    while chosen.len() < MOST {
        let gain = |input: &Input| input.edges.difference(&reached).count();
        let best = (0..others.len())
            .max_by_key(|at| (gain(&others[*at]), std::cmp::Reverse(others[*at].len)));
        let Some(best) = best.filter(|at| gain(&others[*at]) > 0) else {
            break;
        };
        let input = others.swap_remove(best);
        reached.extend(&input.edges);
        chosen.push(input);
    }
    chosen
}

/// Runs every input once. libFuzzer writes the coverage to a file that contains the list of
/// inputs. If an input fails, we start it again and it will continue with the next input.
fn reached(program: &Path, target: &Target, files: Vec<PathBuf>) -> Result<Vec<Input>, Failure> {
    let work = work_dir(target);
    fs::create_dir_all(&work)?;
    let control = work.join("merge");
    let mut list = format!("{}\n0\n", files.len());
    files
        .iter()
        .for_each(|file| list += &format!("{}\n", relative(file)));
    fs::write(&control, &list)?;
    let args = [
        "-merge_inner=2".to_owned(),
        format!("-merge_control_file={}", relative(&control)),
        "-max_len=65536".to_owned(),
        "-timeout=60".to_owned(),
        format!("-artifact_prefix={}/", relative(&work)),
    ];
    for _ in 0..FAILURES {
        let output = File::create(work.join("merge.log"))?;
        let mut command = command(program, target, &args);
        let command = command.stdout(output.try_clone()?).stderr(output);
        if command.status()?.success() {
            return Ok(inputs(files, &fs::read_to_string(&control)?));
        }
    }
    let log = relative(&work.join("merge.log"));
    Err(format!("{}: too many inputs fail, see {log}", target.name).into())
}

/// Parses the edges covered by each input. The line `FT 3 80 81 96` contains the features of input
/// 3. There are eight features for each edge, based on the hit count. An input that failed has no
/// features.
fn inputs(files: Vec<PathBuf>, text: &str) -> Vec<Input> {
    let inputs = files.into_iter().map(|path| Input {
        len: fs::metadata(&path).map_or(0, |m| m.len()),
        path,
        edges: BTreeSet::new(),
    });
    let mut inputs: Vec<_> = inputs.collect();
    for line in text.lines() {
        let Some(numbers) = line.strip_prefix("FT ") else {
            continue;
        };
        let mut numbers = numbers.split(' ').filter_map(|n| n.parse::<u64>().ok());
        let number = numbers.next().and_then(|n| inputs.get_mut(n as usize));
        if let Some(input) = number {
            input.edges = numbers.map(|feature| feature / 8).collect();
        }
    }
    inputs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn input(name: &str, len: u64, edges: &[u64]) -> Input {
        Input {
            path: name.into(),
            len,
            edges: edges.iter().copied().collect(),
        }
    }

    #[test]
    fn inputs_without_new_coverage_are_dropped() {
        let seeds = [input("seed", 9, &[1, 2])];
        let others = vec![
            input("same", 1, &[1, 2]),
            input("long", 50, &[1, 3, 4]),
            input("short", 40, &[3, 4]),
            input("more", 60, &[2, 3, 5, 6, 7]),
            input("too-long", LONGEST + 1, &[9]),
        ];
        let chosen = choose(&seeds, others);
        let names: Vec<_> = chosen.iter().map(|i| i.path.to_str().unwrap()).collect();
        assert_eq!(names, ["more", "short"]);
    }

    #[test]
    fn edges_are_parsed_from_list() {
        let text = "2\n0\na\nb\nSTARTED 0 4\nFT 0 80 81 96\nCOV 0 10 12\nSTARTED 1 3\n";
        let inputs = inputs(vec!["a".into(), "b".into()], text);
        assert_eq!(inputs[0].edges, BTreeSet::from([10, 12]));
        assert!(inputs[1].edges.is_empty(), "it failed");
    }
}
