"""The fields of the engine's options. Made by `tools/options --fix` from their structs in C++."""

from __future__ import annotations

#: The words for the values of the enums.
WORDS: dict[str, tuple[str, ...]] = {'Differing': ('ignore', 'warn', 'error'), 'Policy': ('error', 'report', 'ignore'), 'TwoPhase': ('auto', 'always', 'never'), 'OnError': ('raise', 'warn'), 'InFlight': ('wait', 'fail', 'skip'), 'Mode': ('min', 'max'), 'CachePolicy': ('bypass', 'keep')}

#: By struct: its explanation, and for each field its C++ type and explanation.
FIELDS: dict[str, tuple[str, dict[str, tuple[str, str]]]] = {
    'ByFiles': ('A save in which the ranks communicate only through small files at the path.\n\nThis needs no process group, and does not use an existing one. The ranks decide without communication who writes what, and need not call at the same time; the data of each rank stays on disk until the last rank publishes the checkpoint. A shard whose holders are declared or known from placements is written once, by one of them. Any other shard is written by each rank that has a main replica of it, and these replicas must be equal. Objects that are not wrapped must be on every rank. Only for torch_dist, without `overwrite` and `checks.access`, and only to a path without a checkpoint. See docs/saving_by_files.md.\n\n`save` needs the first three fields. In a `Session` with a group they come from the group.', {
        'rank': ('int', "The number of this rank. If the state has DTensors, it must be torch's global rank."),
        'world_size': ('int', 'how many ranks save; the same on all ranks.'),
        'token': ('std::string', 'A string of 8 to 256 bytes, the same on all ranks of one run of the job and different in every other run, also when the scheduler starts the same job again. A rank that was restarted saves the same state under the same token and so completes the checkpoint. What it wrote before is not written again, and a warning says so; a state with other keys, shapes, dtypes or shards is MismatchError.'),
        'number': ('uint64_t', 'Distinguishes saves that have the same token and the same path. A different state needs a different number. A session counts its saves itself.'),
        'wait': ('bool', 'True: return once the checkpoint is published. False: return once this rank has written its part. The last rank to write then publishes, and SaveResult.published says whether that was this rank.'),
        'torch_rank_local': ('bool', "As with torch's use_collectives=False, each rank writes everything that it holds, replicas included, and `__RANK.metadata` describes what it has written. Torch's ranks can load these files. They appear once all ranks have written, which `wait` waits for, and `published` of the result says. `publish` turns such a checkpoint into an ordinary one."),
    }),
    'LocalCopies': ("Each rank also writes to its own data file what it holds and another rank of its group writes, and objects that are equal here and on the rank that writes them. After a restart with the same sharding the rank then reads no other file for them. Only the manifest lists copies, so stock PyTorch does not see them. Replicas must hold equal elements, else the save is MismatchError with the key. By files only arrays with known holders are copied, and replicas whose id has Megatron's three numbers and ends with 0. Either all ranks of a save give copies or none. UnsupportedError in formats that store each chunk in its own file.", {
        'group': ('std::vector<int>', "The ranks whose shards this rank copies, itself included: a torch process group that it belongs to, or rank numbers in the group that saves. Usually this is the model-parallel group. With the data-parallel group every rank would copy everything that it shares, up to the whole model. `save` needs it; in `tilestone.megatron.save`, None is the model-parallel group of Megatron's parallel_state."),
        'max_bytes': ('std::optional<uint64_t>', "The most bytes of elements and of objects' items that this rank copies, smallest first, because a small copy saves as many reads as a large one; None: no limit. `SaveResult.copies` and `copy_bytes` say what was copied."),
    }),
    'Checks': ('What is checked. Each call uses the fields that concern it, so one value may serve all calls of a program.', {
        'access': ('bool', '`save`: before anything is written, check that the main replicas of all ranks (those whose replica_id is 0) hold every element of each array and every cell of each grid of ShardedObjects exactly once, and raise an error if not. Arrays that are not wrapped count once. Without this option, shards of the same box count as replicas of each other whatever their replica_ids are, and a grid may have empty cells. Not possible by files. `load`: before arrays and objects are read, check the same of what the ranks want; a rank that loads everything, without a template, is not checked. Must be the same on every rank.'),
        'common_differs': ('Differing', '`save`: what to do when the ranks differ in something of which only one rank\'s version is saved: objects (the order of a dict does not matter) and their replicas, Megatron-Core\'s common state, and replicas of arrays of at most 64 KiB. Larger arrays are compared only where DTensors of one key are on disjoint meshes; if they differ, the save is refused with "warn" too. "ignore": compare nothing. "warn": rank 0 logs the keys and the ranks, each once; in Megatron-Core\'s dialect the other ranks log their own keys. "error": MismatchError on every rank, before anything is written. Must be the same on every rank of a save.'),
        'checksums': ('bool', '`load` and `open`: check every byte that is read; whole blocks of 64 KiB to 4 MiB are read for this. Items without checksums of blocks (of other writers, or of earlier versions) are checked if one rank, or several together, read them whole; the log says if parts were not. False: read exactly what is wanted, unchecked. Must be the same on every rank of a load.'),
    }),
    'Differences': ('What a load does about differences between the templates and the checkpoint.\n\n"error" raises; "report" lists the key in `report` and in a warning of rank 0; "ignore" goes on without a warning. If the load continues, the leaf keeps its value from the template. The three policies don\'t apply to values, lists and arrays in the common state (Megatron-Core\'s dialect): the common state comes back as it was saved, and an array of another shape in it is always an error.', {
        'not_in_checkpoint': ('Policy', "A wanted key that the checkpoint doesn't hold. Must be the same on every rank."),
        'not_requested': ('std::optional<Policy>', 'A key of the checkpoint that no rank wants. None: an error below the key of an object with state_dict(); below other dicts and lists of the template one warning, with keys and bytes; ignored elsewhere. `report` lists what is below dicts and lists whatever this says. Must be the same on every rank.'),
        'other_shape': ('Policy', 'A tensor whose wanted global shape differs from the stored one. Must be the same on every rank.'),
        'report': ('LoadReport*', 'Receives what is reported; its lists are emptied first. If the load_state_dict() of an object raises, the report and the arrays are already filled.'),
    }),
    'Reading': ('How files are read.', {
        'two_phase': ('TwoPhase', '`load`: whether data that several ranks want, or that one rank would need many short reads for, is read once by one rank for all. "auto": through the page cache of files if all ranks run on one host, otherwise by messages. "always": by messages. "never": each rank reads for itself. Must be the same on every rank.'),
        'cache': ('std::optional<CachePolicy>', '"keep" leaves what is read in the page cache, so that another load of the same files needs no disk. "bypass" reads large tensors without the page cache, which leaves that memory to others. None: keep where what is read fits into half of the memory that is available (docs/cache.md); `verify` keeps only with "keep". Data that is already in the cache is read from there in any case, and ranks of one host that read for one another through the page cache leave what they read there.'),
        'follow_links': ('bool', 'Read files through any symbolic link that leads out of the directory. Without it, the only such links that are followed lead into a directory "blobs" next to the checkpoint or next to one of its parent directories, as in the Hugging Face hub\'s cache. Other links are UnsafeError, because a checkpoint from somebody else could name any file that you may read (docs/links.md).'),
    }),
    'Resources': ('What a call uses of the machine, on this rank.', {
        'threads': ('int', 'number of threads; 0: as many as the machine has, at most 8.'),
        'buffer_bytes': ('uint64_t', 'Pooled memory, in bytes; in two-phase reading also for the messages.'),
        'files_per_rank': ('int', '`save`: number of data files that each rank writes.'),
    }),
    'SaveOptions': ('The options of a save.', {
        'comm': ('Communicator', 'default: a group of one.'),
        'format': ('std::shared_ptr<const Format>', 'The file format. "torch_dist" is PyTorch\'s. "zarr" can be read by Megatron-Core up to 0.15, the zarr package and tensorstore. With zarr, each array must be sharded into the cells of one regular grid, its dtype must be one of numpy\'s or bfloat16, keys are file paths, and the ranks need a communicator. Must be the same on every rank.'),
        'dialect': ('std::shared_ptr<const Dialect>', 'Which parts of the state are sharded. "pytorch": as described under `state`; stock PyTorch can load the checkpoint. "megatron": only `ShardedTensor`, `ShardedObject`, DTensors and Megatron-Core\'s entities are sharded. Everything else, arrays included, forms one common state, which is saved from rank 0; stock Megatron-Core (0.9 and later) can load the checkpoint. Must be the same on every rank.'),
        'by_files': ('std::optional<ByFiles>', 'with it, `comm` is a group of one.'),
        'overwrite': ('bool', "Replace a valid checkpoint at `path`; without this, saving there is AlreadyExistsError. The old one stays valid until the new one is durable. With format zarr or Megatron-Core's dialect, and when the old checkpoint is of one of these kinds, a new directory is built beside the old one and replaces it as a whole, in one step. Not possible by files. Must be the same on every rank."),
        'checks': ('Checks', 'what is checked.'),
        'copies': ('std::optional<LocalCopies>', 'Also write copies of what other ranks write; None: each shard is written once.'),
        'reuse': ('std::optional<Location>', 'An earlier checkpoint, of which nothing is written again: arrays (of 16 KiB and more) whose bytes are those that it holds under the same key are in files that both checkpoints share, from the second save on that finds them unchanged (docs/run_directories.md). None: everything is written. Without effect in format zarr; not with ByFiles.torch_rank_local.'),
        'resources': ('Resources', 'threads, memory and files.'),
        'timeout': ('double', 'seconds for the whole call, more than 0; None: no limit.'),
        'tp_replica_names': ('bool', "In Megatron-Core's dialects: adds names to the index for a tensor KEY that has replicas on tensor-parallel ranks (the second of the three numbers of a replica id): KEY.__tp_replica_0, ..._1, ..., one for each of these ranks. All name the same bytes. They are for a stock Megatron-Core that asks for them; Tilestone itself knows only KEY. UnsupportedError in other dialects, and in formats whose index is the file names. Must be the same on every rank."),
        'separation_hint': ('std::string', 'Items whose keys begin with this text go to data files of their own, whose names begin with it too: at most 128 bytes, a part of a file name. "": no such files. UnsupportedError by files, and in formats other than torch_dist. The name is that of Megatron-Core\'s option.'),
        'verify_integrity': ('bool', "The caller's ranks meet after the save, to hash the files. The save itself does nothing for it. Must be the same on every rank."),
        'attributes': ('std::map<std::string, std::string>', 'Strings that describe the checkpoint ({"iteration": "100"}), at most 1 MiB in all. `Checkpoint.attributes` returns them, and `tilestone inspect` shows them. Must be the same on every rank.'),
        'tensor_attributes': ('std::map<std::string, Attributes>', 'Attributes of single tensors, by the tensor\'s key and the attribute\'s name ({"layer.w": {"kind": "glu", "order": [0, 1]}}). Values are None, bools, 64-bit ints, floats, strings, bytes, lists, tuples and dicts, nested at most 16 deep and at most 16 MiB in all. Each rank gives attributes of tensors that it holds; those of all ranks are merged. `Checkpoint.tensor_attributes` and `tilestone inspect PATH KEY` return them.'),
        'step': ('std::shared_ptr<RunStep>', "What a CheckpointManager adds (run/inventory.h); only the coordinator's counts. Not by files."),
        'progress': ('ProgressFn', 'True shows a bar on a terminal; a function is called with `Progress`.'),
        'interrupt': ('std::shared_ptr<const Interrupt>', "Another thread may request an interrupt. The save then ends soon, as after any failure: it throws the request's reason here, and InterruptedError on the other ranks. A request has no effect once the checkpoint is being published."),
    }),
    'AsyncOptions': ('The options that a save in the background has beside those of a save.', {
        'on_error': ('OnError', 'What happens when a save fails and a rank does not ask for its result. "raise": the next save of the session, or of the group, raises the error on every rank, and does nothing else. "warn": it logs it and saves. With "warn", a failure of the storage or of another rank before the call returns (StorageError, NotFoundError, TimeoutError, RankFailedError) is not raised either: it is logged, and is the result of the save. A state or an option that can\'t be saved is always an error. With a communicator it must be equal on all ranks.'),
        'in_flight': ('InFlight', 'What happens if the previous save has not ended on some rank. "wait": wait for it. "fail": AlreadyExistsError on every rank. "skip": save nothing, on every rank (AsyncSave.skipped); not possible by files. With a communicator it must be equal on all ranks.'),
        'max_staged_bytes': ('std::optional<uint64_t>', 'The most memory that this rank uses for copies of arrays, in bytes. Arrays that do not fit are written before the call returns. None: all are copied. Not possible by files.'),
    }),
    'Keep': ('Which checkpoints of a run a `CheckpointManager` keeps: those that any of these rules keeps.\n\nOnly complete checkpoints are removed, and only those of steps that the one that has just become durable continues. Steps of other runs stay. Those of a branch that the run has left when it went back are removed once `last` newer ones are durable, whatever the other rules say.', {
        'last': ('size_t', 'how many of the newest; at least 1.'),
        'every': ('uint64_t', 'Those whose step is a multiple of it; None, in C++ 0: no such rule.'),
        'best': ('std::optional<Best>', '(metric, "min" or "max", count): the `count` steps whose metric of this name is the lowest or the highest. Steps without that metric, or where it is NaN, don\'t count.'),
        'newer_than': ('std::optional<double>', 'Those that were saved less than this many seconds ago, and those of unknown age.'),
    }),
    'LoadOptions': ('The options of a load.', {
        'comm': ('Communicator', ''),
        'own_rank': ('std::optional<int>', "Load alone, as this rank of the job (0 or more), without communication; `group` must not be given. From a rank-local checkpoint (torch's use_collectives=False) this rank reads only its own metadata if that holds everything wanted, just as this rank wrote it; otherwise it reads the metadata of all ranks. Other ranks need not call."),
        'format': ('std::shared_ptr<const Format>', 'The file format, "torch_dist" or "zarr"; None: found from the files. Must be the same on every rank.'),
        'unmarked': ('std::shared_ptr<const Dialect>', "The dialect of a checkpoint of which no file names one: Megatron-Core's, before metadata.json is written. Default: PyTorch's. Must be the same on every rank."),
        'cast': ('bool', "Convert from the stored dtype to the wanted one where they differ, as torch's .to() does; but what is too large for float8_e4m3fn or an integer becomes the nearest, NaN the integer 0."),
        'differences': ('Differences', 'what to do about differences between templates and checkpoint.'),
        'checks': ('Checks', 'what is checked.'),
        'reading': ('Reading', 'how files are read.'),
        'resources': ('Resources', 'threads, memory and files.'),
        'timeout': ('double', 'seconds for the whole call, more than 0; None: no limit.'),
        'rename': ('std::function<std::string(const std::string&)>', 'Gives the checkpoint\'s keys the names that `state` has: a function of a key, such as `tilestone.strip_prefix("_orig_mod.")`, or pairs (ECMAScript regular expression, replacement): the first one that is found in a key replaces what it finds. An empty name hides the key. Must be the same function on all ranks. Keys of a common state keep their names.'),
        'subtrees': ('std::vector<Path>', 'Paths below which everything in the checkpoint is loaded into fresh memory, even if `wanted` does not name it: an optimizer without state does not know the names of its state yet.'),
        'fill_empty': ('bool', 'An empty dict or list of `wanted` on every rank asks for what the checkpoint has below its path, where the arrays are whole on this rank (read/empty_places_internal.h says when). Otherwise the load is MismatchError, unless differences.not_requested is "report" or "ignore".'),
        'unmade': ('std::vector<Path>', 'Paths for which the same holds without an empty dict there, whatever other ranks have.'),
        'kept_empty': ('std::vector<Path>', 'paths of empty dicts that ask for nothing all the same.'),
        'complete': ('std::vector<Path>', 'Paths below which everything must be requested, unless differences.not_requested is "report" or "ignore". MismatchError names the keys that the checkpoint has there and that are requested by no rank that lists the path.'),
        'sharded_only': ('bool', "In a dialect that has a common state: the common state is neither read nor returned. The result has exactly the template's leaves; a leaf that is not wrapped is the stored item whose key is the leaf's path. Must be the same on every rank."),
        'objects_by_grid': ('bool', "not_in_checkpoint and not_requested treat the sharded objects of one grid as one: the grid is in the checkpoint, or requested, when any of its objects is, and it is reported under the grid's key. The load still fails when a wanted object is not stored but others of its grid are. Must be the same on every rank."),
        'log_report': ('bool', "rank 0 logs the report; only rank 0's option counts."),
        'progress': ('ProgressFn', 'True shows a bar on a terminal; a function is called with `Progress`.'),
        'interrupt': ('std::shared_ptr<const Interrupt>', 'as in SaveOptions.'),
    }),
    'OpenOptions': ('The options of opening a checkpoint.', {
        'format': ('std::shared_ptr<const Format>', 'The file format, "torch_dist" or "zarr"; None: found from the files.'),
        'unmarked': ('std::shared_ptr<const Dialect>', 'as in LoadOptions.'),
        'checks': ('Checks', 'what is checked.'),
        'reading': ('Reading', 'how files are read.'),
        'resources': ('Resources', 'threads, memory and files.'),
        'interrupt': ('std::shared_ptr<const Interrupt>', 'as in SaveOptions, while opening.'),
    }),
}
