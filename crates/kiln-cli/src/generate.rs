//! `kiln generate`, and the text at the end of a run.

use std::ops::ControlFlow;
use std::path::Path;

use burn::module::Module;
use kiln::Kiln;
use kiln_hub::{Checkpoint, Config, HubError, Tokenizer};
use kiln_models::llama::{GenerateConfig, Llama, LlamaConfig};

use crate::architecture::Architecture;
use crate::args::GenerateArguments;
use crate::config::SampleConfig;
use crate::data::Data;
use crate::error::CliError;
use crate::model::{Heads, Model};
use crate::show;
use crate::train::locate;

/// `kiln generate`.
///
/// # Errors
///
/// [`CliError::Hub`] if there is no such checkpoint, [`CliError::Usage`] if it is no Llama,
/// [`CliError::Model`] for settings out of range.
pub fn command(arguments: &GenerateArguments) -> Result<(), CliError> {
    // The folder of a run stands for its last checkpoint.
    let folder = Path::new(&arguments.model);
    let checkpoint = match folder
        .join("config.toml")
        .is_file()
        .then(|| locate(folder))
        .transpose()?
    {
        Some((_, Some(last))) => Checkpoint::open(last)?,
        Some((run, None)) => return Err(CliError::NoCheckpoint { path: run }),
        None => kiln_hub::load(&arguments.model)?,
    };
    let device = arguments.device;
    let architecture = Architecture::read(&checkpoint)?;
    let Architecture::Llama(sizes) = &architecture else {
        return Err(CliError::Usage(format!(
            "{} is no Llama; only language models continue texts",
            checkpoint.place()
        )));
    };
    let tokenizer = checkpoint.tokenizer()?;
    let config = GenerateConfig {
        max_new_tokens: arguments.tokens,
        temperature: arguments.temperature,
        top_k: arguments.top_k,
        top_p: arguments.top_p,
        stop_tokens: stop_tokens(&checkpoint, sizes, &tokenizer)?,
        seed: arguments.seed,
    };
    let first = match arguments.prompt.is_empty() {
        // There must be a token to continue.
        true => sizes.bos_token_id,
        false => first_token(&checkpoint, sizes)?,
    };
    let Model::Llama(model) = architecture
        .init::<Kiln>(&device)?
        .load(&checkpoint, Heads::Stored)?
    else {
        return Err(CliError::Usage("this architecture makes no Llama".to_owned()));
    };
    show::text(&arguments.prompt);
    continue_text(&model, &tokenizer, &arguments.prompt, first, config, |piece| {
        show::text(piece);
    })?;
    show::line("");
    Ok(())
}

/// A JSON file beside the weights, if there is one.
fn side_config(checkpoint: &Checkpoint, file: &str) -> Result<Option<Config>, HubError> {
    match checkpoint.side_file(file) {
        Ok(path) => Config::read(path).map(Some),
        Err(HubError::MissingFile { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The tokens that end a text: those of `generation_config.json`, which transformers generates by, else those
/// of `config.json`, else the tokenizer's end of text.
fn stop_tokens(
    checkpoint: &Checkpoint,
    sizes: &LlamaConfig,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, CliError> {
    let key = "eos_token_id";
    let generation = side_config(checkpoint, "generation_config.json")?;
    let given = generation.filter(|file| file.get(key).is_some());
    let Some(file) = given else {
        return Ok(match sizes.eos_token_ids.as_slice() {
            [] => tokenizer.end_of_text().into_iter().collect(),
            ids => ids.to_vec(),
        });
    };
    Ok(match file.get(key).is_some_and(serde_json::Value::is_array) {
        true => file.required(key)?,
        false => vec![file.required(key)?],
    })
}

/// The token in front of a text, if the tokenizer does not add it: `tokenizer.json` says which tokens it
/// puts around a text, and `add_bos_token` in `tokenizer_config.json` is for tokenizers that add none.
fn first_token(checkpoint: &Checkpoint, sizes: &LlamaConfig) -> Result<Option<u32>, CliError> {
    let file = side_config(checkpoint, "tokenizer_config.json")?;
    let add = match file {
        Some(file) => file.value_or("add_bos_token", false)?,
        None => false,
    };
    Ok(sizes.bos_token_id.filter(|_| add))
}

/// Makes sure that [`sample`] has something to begin with, before the steps whose text it prints.
///
/// # Errors
///
/// [`CliError::Config`] if the prompt has no token or more than the model takes; [`CliError::Hub`] if it
/// cannot be encoded.
pub fn check_sample(config: &SampleConfig, sizes: &Architecture, data: &Data) -> Result<(), CliError> {
    let (Architecture::Llama(sizes), Some(tokenizer)) = (sizes, &data.tokenizer) else {
        return Ok(());
    };
    if config.tokens == 0 {
        return Ok(());
    }
    check_prompt(&config.prompt, sizes, tokenizer)
}

/// [`check_sample`] of a prompt.
fn check_prompt(prompt: &str, sizes: &LlamaConfig, tokenizer: &Tokenizer) -> Result<(), CliError> {
    let refuse = |reason: String| {
        Err(CliError::config(
            "sample.prompt",
            format!("{reason}, or set sample.tokens = 0 to print no text at the end"),
        ))
    };
    let most = sizes.max_positions().unwrap_or(usize::MAX);
    match tokenizer.encode(prompt, true)?.len() {
        0 => refuse("it has no token: give the beginning of a text".to_owned()),
        tokens if tokens > most => refuse(format!(
            "it has {tokens} tokens, but the model's longest text has {most}: shorten it"
        )),
        _ => Ok(()),
    }
}

/// The text a run prints at its end, prompt included; none if the model is no language model.
///
/// # Errors
///
/// [`CliError::Hub`] or [`CliError::Model`].
pub fn sample(config: &SampleConfig, model: &Model<Kiln>, data: &Data) -> Result<Option<String>, CliError> {
    let (Model::Llama(model), Some(tokenizer)) = (model, &data.tokenizer) else {
        return Ok(None);
    };
    let settings = config.generation(tokenizer.end_of_text().into_iter().collect());
    let mut text = config.prompt.clone();
    continue_text(model, tokenizer, &config.prompt, None, settings, |piece| {
        text.push_str(piece)
    })?;
    Ok(Some(text))
}

/// Continues `prompt`; `print` receives each piece of text as soon as it is certain.
fn continue_text(
    model: &Llama<Kiln>,
    tokenizer: &Tokenizer,
    prompt: &str,
    first: Option<u32>,
    config: GenerateConfig,
    mut print: impl FnMut(&str),
) -> Result<(), CliError> {
    let mut ids = tokenizer.encode(prompt, true)?;
    if let Some(first) = first.filter(|first| ids.first() != Some(first)) {
        ids.insert(0, first);
    }
    // One token may be part of a character: the text so far is decoded as a whole, and a piece is printed
    // when it ends in a whole character.
    let mut tokens = ids.clone();
    let mut printed = tokenizer.decode(&tokens, true)?;
    let mut failed = None;
    let device = model.devices().into_iter().next().unwrap_or_default();
    model.generate(&ids, &config, &device, |token| {
        tokens.push(token);
        match tokenizer.decode(&tokens, true) {
            Ok(text) if text.ends_with(char::REPLACEMENT_CHARACTER) => {}
            Ok(text) => {
                print(added(&printed, &text));
                printed = text;
            }
            Err(error) => {
                failed = Some(error);
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    // The text may end within a character, whose bytes so far show as a replacement character.
    let text = tokenizer.decode(&tokens, true)?;
    print(added(&printed, &text));
    Ok(())
}

/// The part of `text` after its common beginning with `printed`. A tokenizer may join a new token to the
/// text before it in another way than it had ended that text.
fn added<'a>(printed: &str, text: &'a str) -> &'a str {
    let common: usize = printed
        .chars()
        .zip(text.chars())
        .take_while(|(before, now)| before == now)
        .map(|(before, _)| before.len_utf8())
        .sum();
    &text[common..]
}

#[cfg(test)]
mod tests {
    use super::*;
    use kiln::KilnDevice;
    use kiln_hub::save_pretrained;
    use kiln_models::keys::Pretrained;
    use kiln_models::llama::RopeScaling;

    #[test]
    fn a_text_ends_as_the_tokenizer_says_where_the_checkpoint_does_not() {
        let folder = tempfile::tempdir().unwrap();
        let mut sizes = LlamaConfig::new(257, 8, 8, 1, 1);
        let model = sizes.init::<Kiln>(&KilnDevice::cpu());
        save_pretrained(&model, model.key_map(), Some(&sizes.to_hf_json()), folder.path()).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).unwrap();
        let tokenizer = Tokenizer::bytes().unwrap();
        assert_eq!(stop_tokens(&checkpoint, &sizes, &tokenizer).unwrap(), [256]);
        sizes.eos_token_ids = vec![7];
        assert_eq!(stop_tokens(&checkpoint, &sizes, &tokenizer).unwrap(), [7]);
    }

    /// What is refused is what the model itself would not take.
    #[test]
    fn prompts_are_as_long_as_the_model_takes_them() {
        let tokenizer = Tokenizer::bytes().unwrap();
        for scaling in [
            RopeScaling::None,
            RopeScaling::Linear { factor: 2.0 },
            RopeScaling::Dynamic { factor: 2.0 },
        ] {
            let sizes = LlamaConfig::new(257, 8, 8, 1, 1)
                .with_max_position_embeddings(4)
                .with_rope_scaling(scaling);
            let limit = sizes.init::<Kiln>(&KilnDevice::cpu()).max_positions();
            for prompt in ["abcd", "abcde"] {
                let taken = limit.is_none_or(|most| prompt.len() <= most);
                let checked = check_prompt(prompt, &sizes, &tokenizer);
                assert_eq!(checked.is_ok(), taken, "{prompt}, {limit:?}: {checked:?}");
            }
        }
    }

    #[test]
    fn what_is_added_begins_after_the_common_part() {
        assert_eq!(added("ki", "kiln"), "ln");
        assert_eq!(added("", "\u{fffd}"), "\u{fffd}");
        assert_eq!(added("a ,", "a, b"), ", b");
        assert_eq!(added("é", "é"), "");
    }
}
