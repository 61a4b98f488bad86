"""Every command with its function and its summary, which is also the first line of the function's docstring."""

from sm120kit.cli.tree import Branch, Leaf

COMMANDS = Branch(
    "Patch and build vLLM, SGLang and FlashInfer for NVIDIA SM12x GPUs",
    {
        "build": Leaf("build:build", "Build a patched FlashInfer wheel, or an image of vLLM or SGLang with it"),
        "config": Branch(
            "List, show, check and make configurations",
            {
                "list": Leaf("config:list_", "List the configurations"),
                "show": Leaf("config:show", "Show a configuration and its published figures"),
                "check": Leaf("config:check", "Validate configurations"),
                "new": Leaf("config_new:new", "Write a configuration for a model, or from how a server is started elsewhere"),
            },
        ),
        "doctor": Leaf("doctor:doctor", "Diagnose why an SM12x host hangs, is slow or gives wrong results"),
        "explain": Leaf("explain:explain_", "Explain known errors in a log"),
        "init": Leaf("init:init", "Make a repository for your own recipes, patches and configurations"),
        "kld": Leaf("kld:kld", "Measure the KL divergence of a model from a reference"),
        "logs": Leaf("servers:logs", "Show the log of a server"),
        "ps": Leaf("servers:ps", "List the servers that serve started"),
        "publish": Leaf("image:publish", "Push a checked image and list it in the index"),
        "pull": Leaf("image:pull", "Pull a checked image by its digest in the index"),
        "plan": Leaf("server_plan:plan", "Print what a model needs and how it would be served"),
        "serve": Leaf("serve:serve_", "Serve a configuration, a repository of the Hugging Face Hub, or a folder"),
        "stop": Leaf("servers:stop", "Stop a server and remove its container"),
        "tune": Leaf("tune:tune", "Find the fastest all-reduce that works between the GPUs of a configuration"),
        "tiles": Leaf("tiles:tiles_", "List the CTA tiles of an engine and whether SM120 can launch them"),
        "bench": Branch(
            "Measure a server, show and compare results",
            {
                "run": Leaf("bench:run_", "Measure a server over HTTP and write a result"),
                "show": Leaf("bench_results:show", "Show the figures of results, or write them as a table or a page"),
                "compare": Leaf("bench_results:compare", "Compare two results case by case"),
            },
        ),
        "cache": Leaf("cache:cache", "Show and free the disk space of the state directory"),
        "image": Branch(
            "List, load, export and remove images",
            {
                "list": Leaf("image:list_", "List images with their size, digest and checks"),
                "load": Leaf("image:load", "Load an image into the container daemon"),
                "export": Leaf("image:export", "Write an image as an OCI archive"),
                "rm": Leaf("image:rm", "Remove images from the state directory"),
            },
        ),
        "patch": Branch(
            "List, check and edit the patch series",
            {
                "list": Leaf("patch:list_", "List the patches"),
                "status": Leaf("patch:status", "Show the state of each patch on each recipe's version"),
                "check": Leaf("patch:check", "Check that the series are well-formed and apply"),
                "edit": Leaf("patch:edit", "Create a git repository with the series as commits"),
                "export": Leaf("patch:export", "Write the commits of a `patch edit` repository to the patch files"),
                "import": Leaf("patch:import_", "Make patch files of a diff, mail or pull request"),
                "drop": Leaf("patch:drop", "Remove a patch from its series"),
                "rebase": Leaf("patch:rebase", "Move a series to the version of another recipe"),
            },
        ),
        "recipe": Branch(
            "List, check, make and lock recipes",
            {
                "list": Leaf("recipe:list_", "List the recipes"),
                "check": Leaf("recipe:check", "Validate recipes"),
                "new": Leaf("recipe_new:new", "Make the recipe of an upstream release"),
                "update": Leaf("recipe_new:update", "List the upstream releases that are newer than the recipes"),
                "lock": Leaf("recipe:lock", "Lock sources, patches and wheels of recipes by hash"),
            },
        ),
        "verify": Branch(
            "Verify servers, built images and kernels",
            {
                "server": Leaf(
                    "verify_server:verify_server", "Probe a running server for answers that are wrong without an error"
                ),
                "image": Leaf("verify_image:verify_image", "Run the checks of an image and tag it if all pass"),
            },
        ),
    },
    sections={
        "Serve": ("plan", "serve", "ps", "logs", "stop"),
        "Check": ("doctor", "explain", "verify", "bench", "tune", "kld"),
        "Build": ("build", "image", "publish", "pull", "cache"),
        "Develop": ("init", "recipe", "config", "patch", "tiles"),
    },
)
